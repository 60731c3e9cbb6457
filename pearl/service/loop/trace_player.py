"""Plays a trace of arrivals and reclaims into the running job, each event at its time or step.

Its GPUs are chosen as those of ``pearl preempt`` are. An event that cannot be carried out is told, and the run goes on.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from pearl.runtime.clock import Clock
from pearl.service.loop.inbox import Inbox
from pearl.service.loop.pending_preempts import PendingPreempts
from pearl.types.events import PreemptRequested
from pearl.types.ids import GpuId
from pearl.types.messages.control import Preempt
from pearl.types.trace import TraceEvent

log = logging.getLogger(__name__)


class Steps:
    """The trainer's step, for those who wait for one."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._changed = asyncio.Event()

    def reach(self, step: int) -> None:
        self._step = step
        self._changed.set()

    async def until(self, step: int) -> None:
        """Wait for the step, as long as it takes: the end of the run cancels whoever waits."""
        while self._step < step:
            self._changed.clear()
            await self._changed.wait()


class TracePlayer:
    def __init__(
        self,
        trace: Sequence[TraceEvent],
        clock: Clock,
        start: float,
        steps: Steps,
        inbox: Inbox,
        preempts: PendingPreempts,
        say: Callable[[str], None],
    ) -> None:
        """The trace begins at ``start`` on ``clock``: when the run did, in whichever of its lives."""
        self._trace = trace
        self._clock = clock
        self._start = start
        self._steps = steps
        self._inbox = inbox
        self._preempts = preempts
        self._announce = say
        self._num_open = len(trace)
        self._all_settled = asyncio.Event()

    async def play(self) -> None:
        """Play the trace, as long as it takes: the end of the run cancels it."""
        for event in self._trace:
            await self._wait_for(event)
            await self._inbox.put(self._request(event))
        if self._trace:
            await self._all_settled.wait()
        self._announce(f"trace: all {len(self._trace)} events have been played")

    async def _wait_for(self, event: TraceEvent) -> None:
        if event.at_s is not None:
            await self._clock.sleep(max(0.0, self._start + event.at_s - self._clock.now()))
        elif event.at_step is not None:
            await self._steps.until(event.at_step)

    def _request(self, event: TraceEvent) -> PreemptRequested:
        moment = f"{event.at_s:g} s" if event.at_s is not None else f"step {event.at_step}"
        what = f"trace, {moment}: {event.action} of {', '.join(event.gpus) or f'{event.count} GPU(s)'}"

        def accept(gpus: tuple[GpuId, ...]) -> None:
            log.info("%s: %s", what, ", ".join(gpus))
            self._count_event()

        def refuse(error: ValueError) -> None:
            log.warning("%s is left out: %s", what, error)
            self._announce(f"{what} is left out: {error}")
            self._count_event()

        request = Preempt(event.action, event.gpus, event.count, event.grace_s)
        return self._preempts.add(request, accept, refuse)

    def _count_event(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._all_settled.set()


def rest(trace: Sequence[TraceEvent], seconds: float, step: int) -> list[TraceEvent]:
    """Return what a run that is resumed ``seconds`` after its beginning, at ``step``, has not had yet."""
    return [
        event
        for event in trace
        if (event.at_s is not None and event.at_s > seconds)
        or (event.at_step is not None and event.at_step > step)
    ]
