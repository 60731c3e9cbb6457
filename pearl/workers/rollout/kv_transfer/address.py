"""``host:port/token``: where a worker takes KV. The token is that process's own, so that a successor behind the same
port is not taken for it."""

from typing import NamedTuple

from pearl.types import tcp_address
from pearl.workers.rollout.kv_transfer.errors import KvTransferError


class KvAddress(NamedTuple):
    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{tcp_address.join(self.host, self.port)}/{self.token}"


def parse(address: str) -> KvAddress:
    """Raises KvTransferError when it is no address."""
    place, _, token = address.partition("/")
    try:
        host, port = tcp_address.split(place)
    except ValueError:
        host, port = "", 0
    if not port or not token:
        raise KvTransferError(f"pair = {address!r} is no KV address host:port/token")
    return KvAddress(host, port, token)
