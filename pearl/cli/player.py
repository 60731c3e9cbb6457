"""Plays the events of a trace into a live run, one after the other."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pearl.runtime.clock import Clock
from pearl.runtime.errors import RemoteError
from pearl.traces import counts
from pearl.types.messages.control import Preempt, PreemptReply
from pearl.types.trace import TraceEvent

STEP_PERIOD_S = 0.25
"""How often the run is asked for its step while a trace waits for one; a step takes longer."""


class Run(Protocol):
    """The live run, as ``pearl.cli.coordinator_client.CoordinatorClient`` reaches it."""

    async def status(self) -> bytes: ...

    async def preempt(self, message: Preempt) -> PreemptReply: ...


class Player:
    """Prints a line an event. A refused one is said and the next one comes in its time, as on a real cluster."""

    def __init__(self, events: Sequence[TraceEvent], clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._num_tried = 0
        self._num_refused = 0

    @property
    def progress(self) -> str:
        done = f"{self._num_tried} of {len(self._events)} event(s) played"
        return f"{done}, {self._num_refused} of them refused" if self._num_refused else done

    async def play(self, run: Run) -> int:
        """0, or 1 when an event was refused.

        Raises:
            ValueError: the trace does not fit the run; nothing was played.
        """
        _check_fits(self._events, await _status(run))
        began = self._clock.now()
        for event in self._events:
            moment = await self._wait_for(event, began, run)
            self._num_tried += 1
            await self._play_one(event, moment, run)
        return 1 if self._num_refused else 0

    async def _wait_for(self, event: TraceEvent, began: float, run: Run) -> str:
        if event.at_s is not None:
            while (left_s := began + event.at_s - self._clock.now()) > 0:
                await self._clock.sleep(left_s)
            return f"{event.at_s:8.1f} s"
        assert event.at_step is not None, event
        while (step := (await _status(run)).get("step") or 0) < event.at_step:
            await self._clock.sleep(STEP_PERIOD_S)
        return f"step {step:4d}"

    async def _play_one(self, event: TraceEvent, moment: str, run: Run) -> None:
        message = Preempt(event.action, event.gpus, event.count, event.grace_s)
        place = f"[{self._num_tried}/{len(self._events)}] {moment}"
        try:
            line = said(message, await run.preempt(message))
        except RemoteError as error:
            self._num_refused += 1
            print(f"{place}: {wanted(event)} is refused: {error.text}", file=sys.stderr, flush=True)
            return
        print(f"{place}: {line}{self._outlook(event)}", flush=True)

    def _outlook(self, event: TraceEvent) -> str:
        if self._num_tried == len(self._events):
            return ""
        following = self._events[self._num_tried]
        if event.at_s is not None and following.at_s is not None:
            return f"; next in {following.at_s - event.at_s:.1f} s"
        return f"; next at step {following.at_step}"


def said(message: Preempt, reply: PreemptReply) -> str:
    gpus = ", ".join(reply.gpus) or "nothing"
    if message.action == "arrive":
        return f"arrived {gpus}"
    return f"reclaimed {gpus}, to be back within {message.grace_s:g} s"


def wanted(event: TraceEvent) -> str:
    gpus = ", ".join(event.gpus) or f"{event.count} GPU(s)"
    return f"the arrival of {gpus}" if event.action == "arrive" else f"the reclaim of {gpus}"


def describe(events: Sequence[TraceEvent]) -> str:
    """ "12 events over 7140 s"."""
    if not events:
        return "no events"
    last = events[-1]
    over = f"over {last.at_s:.1f} s" if last.at_s is not None else f"up to step {last.at_step}"
    return f"{len(events)} event(s) {over}"


async def _status(run: Run) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(await run.status())
    return answer


def _check_fits(events: Sequence[TraceEvent], status: dict[str, Any]) -> None:
    """Check the trace against the run's status, which says which GPUs may come and go."""
    if "gpus" not in status:
        return
    known = [row.get("gpu") for row in status["gpus"] if row.get("zone") == "preemptible"]
    named = (gpu for event in events for gpu in event.gpus if gpu not in known)
    if (stranger := next(named, None)) is not None:
        raise ValueError(
            f"the trace names {stranger}, but the run's preemptible GPUs are: {', '.join(map(str, known)) or 'none'}"
        )
    most = max((gpus for _, gpus in counts(events)), default=0)
    if most > len(known):
        way_out = (
            f"--max-gpus {len(known)} plays what fits" if known else "elastic.preemptible_gpus sets how many"
        )
        raise ValueError(
            f"the trace has up to {most} GPUs, the run {len(known)} preemptible one(s); {way_out}"
        )
