"""``tcp://HOST:PORT``, where HOST is a name, an IPv4 address or an IPv6 address in brackets."""

import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit


class TcpAddress(NamedTuple):
    host: str  # without brackets
    port: int  # 0 = any free one

    def __str__(self) -> str:
        return f"tcp://{join(self.host, self.port)}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is written as an IPv6 address."""
        return ":" in self.host

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can be meant."""
        ip = self.ip
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """None when the host is a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


def parse(text: str) -> TcpAddress:
    """Return the address that ``text`` is. ValueError when it is none."""
    parts = urlsplit(text)
    host, port = parts.hostname, parts.port
    if parts.scheme != "tcp" or not host or port is None or parts.path or parts.query or "@" in parts.netloc:
        raise ValueError(f"{text!r} is not tcp://HOST:PORT")
    return TcpAddress(host, port)


def join(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(text: str) -> tuple[str, int]:
    """Take ``join`` apart again. ValueError when it is no such text."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address is written in brackets, [ADDRESS]:PORT")
    if not host or not port.isascii() or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)
