"""``host:port/token``: where a worker takes KV. The token is that process's own, so that a successor behind the same
port is not taken for it."""

from typing import NamedTuple

from pearl.workers.rollout.kv_transfer.errors import KvTransferError


class KvAddress(NamedTuple):
    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.token}"


def parse(address: str) -> KvAddress:
    """Raises KvTransferError when it is no address."""
    place, _, token = address.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not token or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise KvTransferError(f"pair = {address!r} is no KV address host:port/token")
    return KvAddress(host, int(port), token)
