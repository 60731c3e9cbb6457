"""Faults between a server or peer and the other side, for tests and chaos runs: part of the API, off until used.

Drops lose frames, as no network should; delays and partitions hold them, in order, as a network does for a while.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from pearl.runtime.clock import Clock

Direction = Literal["in", "out"]
Deliver = Callable[[], None]


class _Link(msgspec.Struct, eq=False):
    drops: dict[Direction, int] = msgspec.field(default_factory=lambda: {"in": 0, "out": 0})
    delay_s: float = 0.0
    cut: bool = False
    # While cut; bounded by what the other side sends.
    held: deque[Deliver] = msgspec.field(default_factory=deque)
    # One timer each, the oldest goes first.
    delayed: deque[Deliver] = msgspec.field(default_factory=deque)


class Faults:
    """Of one server or peer. ``peer`` is the other side's name; that of the coordinator is "coordinator"."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self.active = False
        self.dropped = 0

    def drop(self, peer: str, direction: Direction, count: int) -> None:
        """Lose the next ``count`` frames."""
        self._link(peer).drops[direction] += count

    def delay(self, peer: str, seconds: float) -> None:
        """Hold every frame from it for ``seconds``; 0 ends that for later frames."""
        self._link(peer).delay_s = seconds

    def partition(self, peer: str) -> None:
        """Block everything in both directions until ``heal``."""
        self._link(peer).cut = True

    def heal(self, peer: str) -> None:
        """End a partition: held messages are delivered now, in order; messages waiting to be sent leave at the
        next occasion."""
        link = self._link(peer)
        link.cut = False
        while link.held:
            link.held.popleft()()

    # what the server and the peer ask

    def is_cut(self, peer: str) -> bool:
        return self.active and self._link(peer).cut

    def loses(self, peer: str, direction: Direction) -> bool:
        """True when this frame is to be lost."""
        if not self.active or not self._link(peer).drops[direction]:
            return False
        self._link(peer).drops[direction] -= 1
        self.dropped += 1
        return True

    def deliver(self, peer: str, deliver: Deliver) -> None:
        """A frame came from the peer; ``deliver`` takes it, now, later or never."""
        link = self._link(peer)
        if self.loses(peer, "in"):
            return
        if link.cut:
            link.held.append(deliver)
        elif link.delay_s > 0 or link.delayed:
            link.delayed.append(deliver)
            self._clock.call_later(link.delay_s, lambda: link.delayed.popleft()())
        else:
            deliver()

    def _link(self, peer: str) -> _Link:
        self.active = True
        return self._links.setdefault(peer, _Link())
