"""The training world on the virtual clock: starts, trains, lends its GPUs and takes them back."""

from collections.abc import Callable

from pearl.sim.clock import VirtualClock
from pearl.sim.hardware import Hardware
from pearl.types import commands, events
from pearl.types.events import AnyEvent
from pearl.types.ids import Incarnation
from pearl.types.weights import Version


def checksum(version: Version) -> str:
    """Return the checksum of a version: workers with the same weights have the same."""
    return f"weights-{version}"


class TrainingWorld:
    def __init__(
        self, clock: VirtualClock, hardware: Hardware, num_gpus: int, post: Callable[[AnyEvent], None]
    ) -> None:
        self._clock = clock
        self._costs = hardware.costs
        self._speed = hardware.training
        self._num_gpus = num_gpus
        self._post = post
        self._incarnation: Incarnation | None = None
        self._lineage = 0
        self.busy_seconds = 0.0
        self.trained: list[tuple[int, tuple[int, ...]]] = []  # (step, trajectories), for conservation checks

    def start(self, command: commands.StartTrainer) -> None:
        self._incarnation, self._lineage = command.incarnation, command.lineage
        version = Version(command.lineage, command.restore_step or 0)
        ready = events.TrainerReady(command.op, command.incarnation, version, checksum(version))
        self._answer(command.incarnation, self._costs.trainer_start, ready)

    def train(self, command: commands.Train) -> None:
        tokens = sum(sample.tokens for sample in command.samples)
        seconds = self._speed.fixed_seconds + self._speed.gpu_seconds_per_token * tokens / self._num_gpus
        self.trained.append((command.step, tuple(sample.trajectory for sample in command.samples)))
        version = Version(self._lineage, command.step + 1)
        finished = events.TrainFinished(
            op=command.op,
            incarnation=command.incarnation,
            version=version,
            checksum=checksum(version),
            checkpoint_step=command.step + 1 if command.checkpoint else None,
            metrics={},
            max_logprob_gap=0.0,
            logprob_gap_tokens=0,
        )
        self.busy_seconds += seconds
        self._answer(command.incarnation, seconds, finished)

    def offload(self, command: commands.OffloadTraining) -> None:
        seconds = self._costs.offload
        event = events.TrainingOffloaded(command.op, command.incarnation, seconds)
        self._answer(command.incarnation, seconds, event)

    def restore(self, command: commands.RestoreTraining) -> None:
        seconds = self._costs.restore
        event = events.TrainingRestored(command.op, command.incarnation, seconds)
        self._answer(command.incarnation, seconds, event)

    def stop(self, command: commands.StopTrainer) -> None:
        lost = events.TrainerLost(command.incarnation, command.reason)
        self._answer(command.incarnation, self._costs.exit, lost)

    def _answer(self, incarnation: Incarnation, seconds: float, event: AnyEvent) -> None:
        """Schedule an event unless that incarnation has ended meanwhile."""

        def answer() -> None:
            if self._incarnation == incarnation:
                self._post(event)

        self._clock.after(seconds, answer)
