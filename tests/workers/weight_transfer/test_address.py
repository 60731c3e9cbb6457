import pytest

from pearl.workers.weight_transfer import address
from pearl.workers.weight_transfer.address import advertised_address


@pytest.fixture(autouse=True)
def _two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.7"})


def test_nw_03_a_real_interface_gives_its_address() -> None:
    assert advertised_address("eth0", peers_elsewhere=True) == "10.0.0.7"


def test_nw_03_loopback_is_refused_when_peers_are_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1, which other hosts cannot reach.*eth0"):
        advertised_address("lo", peers_elsewhere=True)
    assert advertised_address("lo", peers_elsewhere=False) == "127.0.0.1"


@pytest.mark.parametrize("interface", ["^lo,docker", "eth0,eth1", "eth9", ""])
def test_nw_03_lists_exclusions_and_unknown_names_are_refused(interface: str) -> None:
    with pytest.raises(ValueError, match="name one of eth0, lo"):
        advertised_address(interface, peers_elsewhere=True)


def test_nw_03_no_route_and_peers_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "default_route_address", lambda: "127.0.0.1")
    assert advertised_address(None, peers_elsewhere=False) == "127.0.0.1"
    with pytest.raises(ValueError, match="of the default route"):
        advertised_address(None, peers_elsewhere=True)
