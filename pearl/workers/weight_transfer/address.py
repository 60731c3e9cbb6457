"""Addresses that others can reach. Host names are never resolved: they often map to loopback."""

import ipaddress
import socket

import psutil


def advertised_address(interface: str | None, *, peers_elsewhere: bool, ipv6: bool = False) -> str:
    """The address that peers should use to reach this host.

    Args:
        interface: one real interface's name, e.g. "eth0"; None = that of the default route.
        peers_elsewhere: peers run on other hosts, so that loopback would reach nobody.
        ipv6: an IPv6 address instead of an IPv4 one, since that is how they reach each other.

    Raises:
        ValueError: the interface does not exist or has no address, or only loopback is there.
    """
    address = default_route_address(ipv6) if interface is None else interface_address(interface, ipv6)
    if peers_elsewhere and ipaddress.ip_address(address).is_loopback:
        raise ValueError(
            f"interface {interface or 'of the default route'} has the loopback address {address}, which other hosts "
            f"cannot reach: name a real interface, one of {', '.join(sorted(addresses(ipv6)))}"
        )
    return address


def interface_address(interface: str, ipv6: bool = False) -> str:
    """Return the interface's first address of that kind. A list or an exclusion such as "^lo,docker" is refused: one
    name only."""
    found = addresses(ipv6)
    if interface not in found:
        raise ValueError(
            f"no interface {interface!r} with an {'IPv6' if ipv6 else 'IPv4'} address: name one of "
            f"{', '.join(sorted(found))}"
        )
    return found[interface]


def addresses(ipv6: bool = False) -> dict[str, str]:
    """Interface -> first address; of IPv6 none that holds on one link only."""
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in reversed(entries)
        if entry.family == family and "%" not in entry.address
    }


def default_route_address(ipv6: bool = False) -> str:
    """The address packets to the outside would carry; loopback when there is no route. Sends nothing."""
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    # Reserved for documentation: nobody is there.
    outside, loopback = ("2001:db8::1", "::1") if ipv6 else ("192.0.2.1", "127.0.0.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((outside, 9))
        except OSError:
            return loopback
        return str(probe.getsockname()[0])
