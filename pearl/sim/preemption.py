"""Preemptible GPUs in a simulated run: asks the core for what a trace says, and counts how long GPUs were there."""

from collections.abc import Callable, Sequence

from pearl.sim.clock import VirtualClock
from pearl.types import commands, events
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
        self._known = set(preemptible_gpus(config))
        self._hosts = {"local"}
        self._present: set[GpuId] = set()
        self._asked: list[TraceEvent] = []  # the number of a request is its index
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
        gpus = tuple(map(GpuId, event.gpus))
        if event.action == "arrive":
            gpus = self._join(gpus)
        if gpus or event.count:
            self._asked.append(event)
            request = len(self._asked) - 1
            hosts = tuple(sorted(self._hosts))
            self._post(
                events.PreemptRequested(
                    request, event.action, gpus, event.count, event.grace_s, hosts, "the trace"
                )
            )

    def _join(self, gpus: tuple[GpuId, ...]) -> tuple[GpuId, ...]:
        """Let the GPUs that the core has never heard of join with their hosts; returns the others."""
        new = tuple(gpu for gpu in gpus if gpu not in self._known)
        if new:
            self._known.update(new)
            self._hosts.update(gpu.rpartition("/")[0] for gpu in new)
            self._count()
            self._present.update(new)
            self._post(events.GpusArrived(new))
        return tuple(gpu for gpu in gpus if gpu not in new)

    def answered(self, command: commands.AnswerPreempt) -> None:
        """Note which GPUs the core has chosen, or that it could not."""
        event = self._asked[command.request]
        if command.error:
            which = f" of {', '.join(event.gpus)}" if event.gpus else ""
            self.left_out.append(f"{event.action}{which} at {self._clock.now:g} s: {command.error}")
            return
        self._count()
        if event.action == "arrive":
            self._present.update(command.gpus)
        else:
            self._present.difference_update(command.gpus)

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
    rollout = config.rollout
    first = config.training.num_ranks + rollout.num_workers * rollout.gpus_per_worker - rollout.reserved_gpus
    return [GpuId(f"local/{first + i}") for i in range(config.elastic.preemptible_gpus)]
