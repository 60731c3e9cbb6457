import ipaddress

import pytest

from pearl.workers.weight_transfer import address
from pearl.workers.weight_transfer.address import advertised_address

FOUR = {"lo": "127.0.0.1", "eth0": "10.0.0.7"}
SIX = {"lo": "::1", "eth0": "fd00::7"}


@pytest.fixture(autouse=True)
def _two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "addresses", lambda ipv6=False: SIX if ipv6 else FOUR)


@pytest.mark.scenario("NW-03")
def test_a_real_interface_gives_its_address() -> None:
    assert advertised_address("eth0", peers_elsewhere=True) == "10.0.0.7"


@pytest.mark.scenario("NW-03")
def test_loopback_is_refused_when_peers_are_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1, which other hosts cannot reach.*eth0"):
        advertised_address("lo", peers_elsewhere=True)
    assert advertised_address("lo", peers_elsewhere=False) == "127.0.0.1"


@pytest.mark.parametrize("interface", ["^lo,docker", "eth0,eth1", "eth9", ""])
@pytest.mark.scenario("NW-03")
def test_lists_exclusions_and_unknown_names_are_refused(interface: str) -> None:
    with pytest.raises(ValueError, match="name one of eth0, lo"):
        advertised_address(interface, peers_elsewhere=True)


@pytest.mark.scenario("NW-03")
def test_no_route_and_peers_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "default_route_address", lambda ipv6=False: "127.0.0.1")
    assert advertised_address(None, peers_elsewhere=False) == "127.0.0.1"
    with pytest.raises(ValueError, match="of the default route"):
        advertised_address(None, peers_elsewhere=True)


def test_an_ipv6_address_is_given_where_hosts_meet_by_ipv6() -> None:
    assert address.interface_address("lo", ipv6=True) == "::1"
    with pytest.raises(ValueError, match="no interface 'none' with an IPv6 address"):
        address.interface_address("none", ipv6=True)
    assert ipaddress.ip_address(address.default_route_address(ipv6=True)).version == 6
