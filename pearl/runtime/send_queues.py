"""Frames from the server to its members: queued for each, tried again when there is room or a connection."""

import logging
from collections.abc import Callable

from pearl.runtime.codec import Kind, encode, encode_reason, pack
from pearl.runtime.errors import PeerGoneError
from pearl.runtime.faults import Faults
from pearl.runtime.peer_table import PeerEntry, PeerTable
from pearl.runtime.zmq_socket import Outbox

log = logging.getLogger("pearl.runtime.rpc_server")


class SendQueues:
    """``transmit`` sends the parts of a frame as ``ZmqSocket.try_send`` does."""

    def __init__(
        self, members: PeerTable, faults: Faults, bound: int, transmit: Callable[[tuple[bytes, bytes]], bool]
    ) -> None:
        self._members = members
        self._faults = faults
        self._bound = bound
        self._transmit = transmit
        self._backlog: set[str] = set()  # members whose outbox is not empty
        self._unconnected: set[str] = set()  # members without a connection when last sent to

    def make_outbox(self, name: str, route: bytes) -> Outbox:
        return Outbox(name, lambda frame: self._send(name, route, frame), self._bound)

    def post(self, member: PeerEntry, kind: Kind, op: int, body: bytes) -> None:
        """QueueFullError: it was not accepted."""
        member.outbox.put(kind, op, body)
        if member.outbox:
            self._backlog.add(member.name)

    def refuse(self, route: bytes, name: str, op: int, reason: str) -> None:
        """Send a refusal if that is possible at once; a peer that misses it ends by its lease."""
        self._send(name, route, pack(0, Kind.REFUSAL, op, encode_reason(reason)))
        self._members.note_refused(route)

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        for name in list(self._backlog):
            member = self._members.by_name.get(name)
            if member is not None:
                member.outbox.flush()
            if member is None or not member.outbox:
                self._backlog.discard(name)

    def keep_alive(self) -> list[str]:
        """A word to everyone. Returns those that only asked and went; about the others their watcher decides."""
        before, self._unconnected = self._unconnected, set()
        for member in self._members.by_name.values():
            member.outbox.put_if_idle(Kind.KEEPALIVE, 0, encode(None))
            if member.outbox:
                self._backlog.add(member.name)
        # A second look at full pipes: that they have room again is an edge, which another call may have swallowed.
        self.flush()
        names = self._members.by_name
        self._unconnected &= names.keys()
        for name in self._unconnected - before:
            log.info("%s has no connection", name)
        for name in (before - self._unconnected) & names.keys():
            log.info("%s is connected again", name)
        return [name for name in self._unconnected if names[name].hello.kind == "admin"]

    def reaches(self, member: PeerEntry) -> bool:
        """A word to it now, and whether there is a connection for that."""
        self._unconnected.discard(member.name)
        member.outbox.flush()
        member.outbox.put_if_idle(Kind.KEEPALIVE, 0, encode(None))
        if member.outbox:
            self._backlog.add(member.name)
        return member.name not in self._unconnected

    def _send(self, name: str, route: bytes, frame: bytes) -> bool:
        if self._faults.active:
            if self._faults.is_cut(name):
                return False
            if self._faults.loses(name, "out"):
                return True
        try:
            return self._transmit((route, frame))
        except PeerGoneError:
            self._unconnected.add(name)
            return False
