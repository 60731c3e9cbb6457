"""Turns that two workers share: one prefills, its keys and values travel, the other decodes.

A decode half waits here until they have arrived. The prefill worker's link is shared by all that it sends; what the
decode worker keeps of the trajectory need not be sent again.
"""

from typing import Protocol

from pearl.sim.clock import VirtualClock
from pearl.sim.engine import Engine
from pearl.sim.hardware import WorkerSpeed
from pearl.sim.requests import Progress, Request
from pearl.sim.transfers import SharedLink
from pearl.state.ids import AttemptId


class Party(Protocol):
    """One of the two workers."""

    @property
    def engine(self) -> Engine: ...
    @property
    def link(self) -> SharedLink: ...


class _Half:
    """A decode half that waits. ``flow`` is the transfer's number on ``link``, once it has begun."""

    __slots__ = ("decode", "flow", "link", "prefill", "request")

    def __init__(self, request: Request, prefill: Party | None, decode: Party) -> None:
        self.request = request
        self.prefill = prefill
        self.decode = decode
        self.flow = 0
        self.link: SharedLink | None = None

    def cancel(self) -> None:
        """On the link that it travels on, whatever has become of its worker."""
        if self.link is not None:
            self.link.cancel(self.flow)


class Pairs:
    def __init__(self, clock: VirtualClock, speed: WorkerSpeed) -> None:
        self._clock = clock
        self._speed = speed
        self._waiting: dict[AttemptId, _Half] = {}

    def make_link(self) -> SharedLink:
        return SharedLink(self._clock, self._speed.kv_bandwidth_bytes_per_s)

    def begin(self, request: Request, prefill: Party | None, decode: Party) -> None:
        """``prefill`` None: it died just now, and the decode half waits until it is told so."""
        self._waiting[request.attempt] = _Half(request, prefill, decode)
        if prefill is not None:
            prefill.engine.add(request._replace(part="prefill"))

    def prefilled(self, attempt: AttemptId) -> None:
        """The first half is done: send what the decode worker lacks."""
        half = self._waiting.get(attempt)
        if half is None or half.prefill is None:
            return  # the decode half was aborted
        request = half.request
        lacking = request.context_tokens - half.decode.engine.cache.kept_tokens(request.trajectory)
        num_bytes = max(1, lacking) * self._speed.kv_bytes_per_token
        half.link = half.prefill.link
        half.flow = half.link.send(num_bytes, lambda: self._arrived(attempt))

    def _arrived(self, attempt: AttemptId) -> None:
        half = self._waiting.pop(attempt)
        half.decode.engine.add(half.request._replace(part="decode"))

    def abort(self, attempt: AttemptId, decode: Party) -> Progress | None:
        """End a decode half that waits; None when there is none of that attempt there."""
        half = self._waiting.get(attempt)
        if half is None or half.decode is not decode:
            return None
        del self._waiting[attempt]
        half.cancel()
        return Progress(half.request, 0, 0, "abort")

    def abort_all(self, decode: Party) -> list[Progress]:
        attempts = [attempt for attempt, half in self._waiting.items() if half.decode is decode]
        return [ended for attempt in attempts if (ended := self.abort(attempt, decode)) is not None]

    def break_off(self, prefill: Party) -> list[tuple[Party, Progress]]:
        """The prefill worker is gone. What it was sending fails at the decode workers; what it had not begun to send
        waits on until it is aborted."""
        broken = []
        for attempt, half in list(self._waiting.items()):
            if half.prefill is prefill:
                half.prefill = None
                if half.flow:
                    half.cancel()
                    del self._waiting[attempt]
                    broken.append((half.decode, Progress(half.request, 0, 0, "error")))
        return broken
