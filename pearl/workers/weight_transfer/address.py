"""Addresses that others can reach. Host names are never resolved: they often map to loopback."""

import ipaddress
import socket

import psutil


def advertised_address(interface: str | None, *, peers_elsewhere: bool) -> str:
    """The IPv4 address that peers should use to reach this host.

    Args:
        interface: one real interface's name, e.g. "eth0"; None = that of the default route.
        peers_elsewhere: peers run on other hosts, so that loopback would reach nobody.

    Raises:
        ValueError: the interface does not exist or has no address, or only loopback is there.
    """
    address = default_route_address() if interface is None else interface_address(interface)
    if peers_elsewhere and ipaddress.ip_address(address).is_loopback:
        raise ValueError(
            f"interface {interface or 'of the default route'} has the loopback address {address}, which other hosts "
            f"cannot reach: name a real interface, one of {', '.join(sorted(addresses()))}"
        )
    return address


def interface_address(interface: str) -> str:
    """Return the interface's first IPv4 address. A list or an exclusion such as "^lo,docker" is refused: one name
    only."""
    found = addresses()
    if interface not in found:
        raise ValueError(
            f"no interface {interface!r} with an IPv4 address: name one of {', '.join(sorted(found))}"
        )
    return found[interface]


def addresses() -> dict[str, str]:
    """Interface -> first IPv4 address."""
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in reversed(entries)
        if entry.family == socket.AF_INET
    }


def default_route_address() -> str:
    """The address packets to the outside would carry; loopback when there is no route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: nobody is there
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
