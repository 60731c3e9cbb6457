"""Preemptible GPUs in a simulated run: plays a trace, and counts how long GPUs were there.

The newest to arrive are the first to go, so counts mean whole workers as long as they come and go in multiples of one.
"""

from collections.abc import Callable, Sequence

from pearl.sim.clock import VirtualClock
from pearl.types import events
from pearl.types.config import Config
from pearl.types.events import AnyEvent
from pearl.types.ids import GpuId
from pearl.types.trace import TraceEvent


class Preemption:
    """Does nothing when the policy does not use preemptible GPUs."""

    def __init__(
        self,
        clock: VirtualClock,
        config: Config,
        trace: Sequence[TraceEvent],
        post: Callable[[AnyEvent], None],
    ) -> None:
        self._clock = clock
        self._post = post
        self._trace = tuple(trace) if config.elastic.inter else ()
        self._absent = list(reversed(preemptible_gpus(config)))  # the lowest last: it comes next
        self._present: list[GpuId] = []
        self._speed = config.elastic.trace_speed
        self._at_step = sorted(
            (event for event in self._trace if event.at_step is not None), key=lambda e: e.at_step or 0
        )
        self._since_s = 0.0
        self._gpu_seconds = 0.0
        self.left_out: list[str] = []
        """What the trace asked for and could not be done."""

    def begin(self) -> None:
        for event in self._trace:
            if event.at_s is not None:
                self._schedule(event.at_s / self._speed, event)

    def _schedule(self, at_s: float, event: TraceEvent) -> None:
        self._clock.at(at_s, lambda: self._happen(event))

    def on_step(self, step: int) -> None:
        while self._at_step and (self._at_step[0].at_step or 0) <= step:
            self._happen(self._at_step.pop(0))

    def _happen(self, event: TraceEvent) -> None:
        self._count()
        if event.action == "arrive":
            self._arrive(event)
        else:
            self._reclaim(event)

    def _arrive(self, event: TraceEvent) -> None:
        gpus = [GpuId(gpu) for gpu in event.gpus] or self._absent[-event.count :][::-1]
        gpus = [gpu for gpu in gpus if gpu not in self._present]
        self._score(event, gpus)
        self._present.extend(gpus)
        self._absent = [gpu for gpu in self._absent if gpu not in gpus]
        if gpus:
            self._post(events.GpusArrived(tuple(gpus)))

    def _reclaim(self, event: TraceEvent) -> None:
        gpus = [GpuId(gpu) for gpu in event.gpus] or self._present[-event.count :][::-1]
        gpus = [gpu for gpu in gpus if gpu in self._present]
        self._score(event, gpus)
        self._present = [gpu for gpu in self._present if gpu not in gpus]
        self._absent.extend(gpus)
        if gpus:
            self._post(events.GpusReclaimed(tuple(gpus), event.grace_s, "the trace"))

    def _score(self, event: TraceEvent, gpus: list[GpuId]) -> None:
        missing = (len(event.gpus) or event.count) - len(gpus)
        if missing:
            which = f" of {', '.join(event.gpus)}" if event.gpus else ""
            self.left_out.append(f"{event.action}{which} at {self._clock.now:g} s: {missing} GPU(s) too many")

    def _count(self) -> None:
        self._gpu_seconds += len(self._present) * (self._clock.now - self._since_s)
        self._since_s = self._clock.now

    @property
    def gpu_seconds(self) -> float:
        """Return the GPU-seconds of preemptible GPUs present until now."""
        self._count()
        return self._gpu_seconds


def preemptible_gpus(config: Config) -> list[GpuId]:
    """Return the preemptible GPUs of the coordinator's own host, after those of training and of the dedicated
    workers."""
    first = config.training.num_ranks + config.rollout.num_workers * config.rollout.gpus_per_worker
    return [GpuId(f"local/{first + i}") for i in range(config.elastic.preemptible_gpus)]
