"""What rank 0 answers to the coordinator: it collects samples and demonstrations, and checks each command before
the training world acts on it. Runs on the event loop; the work itself is done elsewhere, by ``execute``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pearl.state.config import Config
from pearl.state.messages.control import Ack, Heartbeat, Shutdown
from pearl.state.messages.training import (
    AddDemonstrations,
    AddSamples,
    Demonstration,
    Sample,
    StartTraining,
    StartTrainingReply,
    TrainStep,
    TrainStepReply,
)
from pearl.workers.training.commands import Begin, Command, Progress, Step

Message = AddSamples | AddDemonstrations | StartTraining | TrainStep | Shutdown
Reply = StartTrainingReply | TrainStepReply
NEWEST = -1
"""``StartTraining.restore_step`` that asks for the newest complete checkpoint."""


class Checkpoints(Protocol):
    """What is asked of the checkpoints before the world acts; see ``CheckpointStore``."""

    def newest(self) -> int | None: ...

    def verified(self, step: int) -> object:
        """Raises ValueError when there is none, or a damaged one."""
        ...

    def discard_after(self, step: int) -> list[int]: ...


class TrainingService:
    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        progress: Progress,
        execute: Callable[[Command], Awaitable[Reply]],
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._progress = progress
        self._execute = execute
        self._demonstrations: list[Demonstration] = []
        self._samples: dict[int, dict[int, Sample]] = {}  # step -> trajectory -> sample
        self._repeated = 0  # samples that came again
        self._step: int | None = None  # to be trained next; None before the start
        self._is_starting = False
        self._is_training = False

    async def handle(self, message: Message) -> Reply | Ack | None:
        """Raises ValueError for a command that does not fit; the world is then as it was."""
        match message:
            case AddSamples():
                return self._add_samples(message)
            case AddDemonstrations():
                return self._add_demonstrations(message)
            case StartTraining():
                return await self._start(message)
            case TrainStep():
                return await self._train(message)
            case Shutdown():
                return None

    def heartbeat(self) -> Heartbeat:
        working = self._is_starting or self._is_training
        return Heartbeat(self._progress.micro_batches, self._progress.busy if working else "", int(working))

    # collecting

    def _add_demonstrations(self, message: AddDemonstrations) -> Ack:
        total = len(self._demonstrations) + len(message.demonstrations)
        limit = self._config.warm_start.num_demonstrations
        if total > limit:
            raise ValueError(f"{total} demonstrations came, warm_start.num_demonstrations = {limit}")
        self._demonstrations += message.demonstrations
        return Ack()

    def _add_samples(self, message: AddSamples) -> Ack:
        first, ahead = self._step or 0, self._config.rollout.staleness_bound + 1
        if not first <= message.step <= first + ahead:
            raise ValueError(
                f"samples for step {message.step}, but steps {first} to {first + ahead} can come now"
            )
        held = self._samples.setdefault(message.step, {})
        new = {sample.trajectory: sample for sample in message.samples if sample.trajectory not in held}
        limit = self._config.data.batch_size
        if len(held) + len(new) > limit:
            raise ValueError(
                f"step {message.step} would have {len(held) + len(new)} samples, data.batch_size = {limit}"
            )
        self._repeated += len(message.samples) - len(new)
        held.update(new)
        return Ack()

    # working

    async def _start(self, message: StartTraining) -> Reply:
        if self._step is not None or self._is_starting:
            raise ValueError("the training world has been started; only a new incarnation can start again")
        self._is_starting = True
        self._progress.busy = "checkpoint"
        try:
            restore_step = await asyncio.to_thread(self._find, message.restore_step)
            demonstrations, self._demonstrations = tuple(self._demonstrations), []
            reply = await self._execute(
                Begin(message.lineage, restore_step, demonstrations if restore_step is None else ())
            )
        finally:
            self._is_starting = False
        self._step = reply.snapshot.version.step
        return reply

    def _find(self, asked: int | None) -> int | None:
        """The step to restore, its checkpoint read and found undamaged. Checkpoints after it never happened."""
        step = self._checkpoints.newest() if asked == NEWEST else asked
        if asked is not None:
            if step is None:
                raise ValueError("there is no complete checkpoint to restore from; start without restoring")
            self._checkpoints.verified(step)
        self._checkpoints.discard_after(step or 0)
        return step

    async def _train(self, message: TrainStep) -> Reply:
        held = self._checked_step(message)
        step = Step(message.step, tuple(held.values()), message.checkpoint)
        repeated, self._repeated = self._repeated, 0
        self._is_training = True
        self._progress.busy = "training"
        try:
            reply = await self._execute(step)
        finally:
            self._is_training = False
        assert isinstance(reply, TrainStepReply), reply
        self._step = reply.snapshot.version.step
        self._samples = {step: held for step, held in self._samples.items() if step >= self._step}
        reply.metrics["samples_repeated"] = float(repeated)
        return reply

    def _checked_step(self, message: TrainStep) -> dict[int, Sample]:
        if self._step is None or self._is_training:
            raise ValueError(f"step {message.step} cannot be trained while the world starts or trains")
        if message.step != self._step:
            raise ValueError(
                f"step {message.step} is asked for, but version {self._step} is to be trained next"
            )
        held = self._samples.get(message.step, {})
        if len(held) != message.num_samples:
            raise ValueError(
                f"step {message.step} is to be trained on {message.num_samples} samples, {len(held)} came"
            )
        return held
