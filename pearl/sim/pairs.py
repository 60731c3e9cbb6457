"""Turns that two workers share: one prefills, its keys and values travel, the other decodes.

A decode stage waits here until they have arrived. The prefill worker's link is shared by all that it sends; what the
decode worker keeps of the trajectory need not be sent again.
"""

from typing import Protocol

from pearl.sim.clock import VirtualClock
from pearl.sim.engine import Engine
from pearl.sim.hardware import WorkerSpeed
from pearl.sim.requests import Progress, Request
from pearl.sim.transfers import SharedLink
from pearl.types.ids import AttemptId


class Party(Protocol):
    """One of the two workers of a pair."""

    @property
    def engine(self) -> Engine: ...
    @property
    def link(self) -> SharedLink: ...


class _Stage:
    """A decode stage that waits. ``flow`` is the transfer's number on ``link``, once it has begun."""

    __slots__ = ("decode", "flow", "link", "prefill", "request")

    def __init__(self, request: Request, prefill: Party | None, decode: Party) -> None:
        self.request = request
        self.prefill = prefill
        self.decode = decode
        self.flow = 0
        self.link: SharedLink | None = None

    def cancel(self) -> None:
        """Cancel the transfer on the link it uses, whatever has become of its worker."""
        if self.link is not None:
            self.link.cancel(self.flow)


class Pairs:
    def __init__(self, clock: VirtualClock, speed: WorkerSpeed) -> None:
        self._clock = clock
        self._speed = speed
        self._waiting: dict[AttemptId, _Stage] = {}

    def make_link(self) -> SharedLink:
        return SharedLink(self._clock, self._speed.kv_bandwidth_bytes_per_s)

    def begin(self, request: Request, prefill: Party | None, decode: Party) -> None:
        """Start a pair; ``prefill`` None: that worker has just died, and the decode stage waits until the core
        aborts it."""
        self._waiting[request.attempt] = _Stage(request, prefill, decode)
        if prefill is not None:
            prefill.engine.add(request._replace(part="prefill"))

    def prefilled(self, attempt: AttemptId) -> None:
        """Finish the prefill stage: send what the decode worker lacks."""
        stage = self._waiting.get(attempt)
        if stage is None or stage.prefill is None:
            return  # the decode stage was aborted
        request = stage.request
        lacking = request.context_tokens - stage.decode.engine.cache.kept_tokens(request.trajectory)
        num_bytes = max(1, lacking) * self._speed.kv_bytes_per_token
        stage.link = stage.prefill.link
        stage.flow = stage.link.send(num_bytes, lambda: self._arrived(attempt))

    def _arrived(self, attempt: AttemptId) -> None:
        stage = self._waiting.pop(attempt)
        stage.decode.engine.add(stage.request._replace(part="decode"))

    def abort(self, attempt: AttemptId, decode: Party) -> Progress | None:
        """End a decode stage that waits; returns None when that attempt has none there."""
        stage = self._waiting.get(attempt)
        if stage is None or stage.decode is not decode:
            return None
        del self._waiting[attempt]
        stage.cancel()
        return Progress(stage.request, 0, 0, "abort")

    def abort_all(self, decode: Party) -> list[Progress]:
        attempts = [attempt for attempt, stage in self._waiting.items() if stage.decode is decode]
        return [ended for attempt in attempts if (ended := self.abort(attempt, decode)) is not None]

    def break_off(self, prefill: Party) -> list[tuple[Party, Progress]]:
        """End all that a dead prefill worker was sending: it fails at the decode workers. What it had not begun to
        send waits on until it is aborted."""
        broken = []
        for attempt, stage in list(self._waiting.items()):
            if stage.prefill is prefill:
                stage.prefill = None
                if stage.flow:
                    stage.cancel()
                    del self._waiting[attempt]
                    broken.append((stage.decode, Progress(stage.request, 0, 0, "error")))
        return broken
