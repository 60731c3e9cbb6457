"""Addresses with names, IPv4 and IPv6."""

import pytest

from pearl.types import tcp_address


@pytest.mark.parametrize(
    ("text", "host", "port", "is_ipv6", "is_loopback"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1", 0, False, True),
        ("tcp://[::1]:7000", "::1", 7000, True, True),
        ("tcp://[::]:7000", "::", 7000, True, False),
        ("tcp://[fe80::1%eth0]:7000", "fe80::1%eth0", 7000, True, False),
        ("tcp://localhost:1", "localhost", 1, False, True),
        ("tcp://node7:65535", "node7", 65535, False, False),
        ("tcp://127.example.org:1", "127.example.org", 1, False, False),
    ],
)
def test_what_is_an_address(text: str, host: str, port: int, is_ipv6: bool, is_loopback: bool) -> None:
    address = tcp_address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert (address.is_ipv6, address.is_loopback) == (is_ipv6, is_loopback)
    assert str(address) == text
    assert tcp_address.split(tcp_address.join(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "127.0.0.1:1",
            "http://a:1",
            "tcp://:1",
            "tcp://a",
            "tcp://a:b",
            "tcp://a:65536",
            "tcp://a:1/b",
        ),
        *("tcp://::1:7000", "tcp://[::1:7000", "tcp://[::1]", "tcp://[zz]:1", "tcp://me@a:1"),
    ],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the text is the standard library's where it finds the fault
        tcp_address.parse(text)


@pytest.mark.parametrize(
    "text", ["", "a", ":1", "a:", "a:b", "::1:7", "[::1]", "[]:7", "a:70000", "a:\u0663"]
)
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT|in brackets"):
        tcp_address.split(text)
