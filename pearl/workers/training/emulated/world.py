"""The emulated training world: does each command in its nominal time, with the timing noise of its step."""

import logging
import os
import socket

from pearl.runtime.clock import Clock
from pearl.runtime.counter_rng import lognormal
from pearl.types.config import Config
from pearl.types.messages.training import (
    Offload,
    OffloadReply,
    Restore,
    RestoreReply,
    StartTrainingReply,
    TrainStepReply,
)
from pearl.types.weights import Snapshot, SnapshotSource, Version
from pearl.workers.emulated_model import snapshot_of
from pearl.workers.training.emulated.checkpoints import EmulatedCheckpoints
from pearl.workers.training.rank_commands import Begin, Command, Progress, Step
from pearl.workers.training.samples import unpack
from pearl.workers.training.service import Reply

log = logging.getLogger(__name__)

_NOISE_STREAM = 0x747261696E
"""Keeps the draws of training apart from those of the rollout slots."""

NOMINAL_STATE_BYTES = 128 << 30
"""What an offload says it freed: sixteen bytes for each of eight billion parameters, over all ranks."""


class EmulatedWorld:
    def __init__(
        self,
        config: Config,
        incarnation: int,
        vocabulary_size: int,
        checkpoints: EmulatedCheckpoints,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._config = config
        self._timing = config.emulated
        self._vocabulary_size = vocabulary_size
        self._checkpoints = checkpoints
        self._progress = progress
        self._clock = clock
        self._source = SnapshotSource(0, incarnation, socket.gethostname(), f"/proc/{os.getpid()}", "")
        self._lineage = 0

    async def execute(self, command: Command) -> Reply:
        match command:
            case Begin():
                return await self._begin(command)
            case Step():
                return await self._step(command)
            case Offload():
                await self._clock.sleep(self._timing.offload_seconds)
                return OffloadReply(NOMINAL_STATE_BYTES, {"backup": self._timing.offload_seconds})
            case Restore():
                await self._clock.sleep(self._timing.restore_seconds)
                return RestoreReply({"restore": self._timing.restore_seconds})
            case _:
                raise ValueError(f"the emulated training world does not do {type(command).__name__}")

    async def _begin(self, command: Begin) -> StartTrainingReply:
        await self._clock.sleep(self._timing.start_seconds)
        self._lineage = command.lineage
        step = command.restore_step or 0
        if command.restore_step is None and not self._save(step):
            raise ValueError(f"no checkpoint can be written to {self._checkpoints.root}; see the log")
        return StartTrainingReply(self._publish(step), command.restore_step is not None, {})

    async def _step(self, command: Step) -> TrainStepReply:
        samples = unpack(command.samples, self._vocabulary_size)
        timing = self._timing
        seconds = lognormal(
            timing.train_seconds, timing.noise, self._config.run.seed, _NOISE_STREAM, command.step
        )
        await self._clock.sleep(seconds)
        self._progress.count()
        snapshot = self._publish(command.step + 1)
        is_saved = command.checkpoint and self._save(snapshot.version.step)
        metrics = {
            "tokens_trained": float(sum(sample.num_trained for sample in samples)),
            "samples_trained": float(sum(sample.is_run for sample in samples)),
            "samples_masked": float(sum(sample.masked for sample in samples)),
            "samples_invalid": float(sum(sample.invalid for sample in samples)),
            "checkpoints_failed": float(command.checkpoint and not is_saved),
        }
        return TrainStepReply(snapshot, snapshot.version.step if is_saved else None, metrics, 0.0, 0)

    def _publish(self, step: int) -> Snapshot:
        return snapshot_of(Version(self._lineage, step), self._source)

    def _save(self, step: int) -> bool:
        try:
            self._checkpoints.save(step, self._lineage)
        except OSError as error:
            log.error("no checkpoint of step %d: %s", step, error)
            return False
        return True
