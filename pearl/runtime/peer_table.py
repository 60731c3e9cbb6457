"""Who is in: peers by name and by route, whom to let in, and who was turned away."""

from collections import deque

import msgspec

from pearl.runtime.installation import CHECKED, differences
from pearl.runtime.zmq_socket import Outbox
from pearl.types.messages.control import Hello, Installation

MAX_STRANGERS = 1024  # routes remembered as refused
MAX_ADMINS = 64  # at once
MAX_AGENTS = 4096


def peer_name(hello: Hello) -> str:
    return f"{hello.kind}.{hello.slot}.{hello.incarnation}"


class PeerEntry(msgspec.Struct, eq=False):
    name: str
    route: bytes  # of its socket; another one for each process
    hello: Hello
    outbox: Outbox
    last_heard: float
    expected: int  # sequence number of its next frame


class PeerTable:
    def __init__(self, run_id: str, installation: Installation | None = None) -> None:
        """``installation`` is what agents and workers must have; None = they are not asked."""
        self._run_id = run_id
        self._installation = installation
        self._by_route: dict[bytes, PeerEntry] = {}
        self._newest: dict[tuple[str, int], int] = {}  # incarnation by kind and slot
        self._strangers: deque[bytes] = deque(maxlen=MAX_STRANGERS)
        self.by_name: dict[str, PeerEntry] = {}

    def at(self, route: bytes) -> PeerEntry | None:
        return self._by_route.get(route)

    def add(self, member: PeerEntry) -> None:
        self.by_name[member.name] = self._by_route[member.route] = member
        hello = member.hello
        if hello.kind != "admin":  # not numbered in order, and of any number
            self._newest[hello.kind, hello.slot] = hello.incarnation

    def remove(self, name: str) -> PeerEntry | None:
        member = self.by_name.pop(name, None)
        if member is not None:
            del self._by_route[member.route]
        return member

    def has(self, member: PeerEntry) -> bool:
        """Whether this very member is still in, not another one under its name."""
        return self._by_route.get(member.route) is member

    def note_refused(self, route: bytes) -> bool:
        """False when it was noted before."""
        if route in self._strangers:
            return False
        self._strangers.append(route)
        return True

    def objection(self, hello: Hello) -> str:
        """Why not to let it in; "" = welcome."""
        # The agent in slot 0 is the coordinator's own, which knows its run.
        is_new_here = not hello.run_id and (
            hello.kind == "admin" or (hello.kind == "agent" and hello.slot > 0)
        )
        if hello.run_id != self._run_id and not is_new_here:
            return f"it belongs to run {hello.run_id!r}, this is run {self._run_id!r}"
        if (member := self.by_name.get(peer_name(hello))) is not None:
            return f"there is a {member.name} already: pid {member.hello.pid} on {member.hello.host}"
        if (most := {"admin": MAX_ADMINS, "agent": MAX_AGENTS}.get(hello.kind)) is not None:
            there = sum(member.hello.kind == hello.kind for member in self.by_name.values())
            if there >= most:
                return (
                    f"{there} peers of kind {hello.kind} are connected, which is the limit: try again later"
                )
        newest = self._newest.get((hello.kind, hello.slot), hello.incarnation)
        if hello.incarnation < newest:
            return f"incarnation {newest} of it has been here since"
        if self._installation is not None and hello.kind in CHECKED:
            return differences(self._installation, hello.installation)
        return ""
