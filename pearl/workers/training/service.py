"""What rank 0 answers to the coordinator: it collects samples and demonstrations, and checks each command before
the training world acts on it. Runs on the event loop; the work itself is done elsewhere, by ``execute``.

The world does one thing at a time. While its state is off the devices, samples may come but no step is trained.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from pearl.types.config import Config
from pearl.types.messages.control import Ack, Heartbeat, Shutdown
from pearl.types.messages.training import (
    AddDemonstrations,
    AddSamples,
    Demonstration,
    Offload,
    OffloadReply,
    Restore,
    RestoreReply,
    Sample,
    StartTraining,
    StartTrainingReply,
    TrainStep,
    TrainStepReply,
)
from pearl.workers.training.rank_commands import Begin, Command, Progress, Step

Message = AddSamples | AddDemonstrations | StartTraining | TrainStep | Offload | Restore | Shutdown
Reply = StartTrainingReply | TrainStepReply | OffloadReply | RestoreReply
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
        self._is_working = False
        self._is_offloaded = False  # wholly or, after an offload that failed, partly

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
            case Offload():
                return await self._offload(message)
            case Restore():
                return await self._restore(message)
            case Shutdown():
                return None

    def heartbeat(self) -> Heartbeat:
        busy = self._progress.busy if self._is_working else ""
        return Heartbeat(self._progress.micro_batches, busy, int(self._is_working))

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
        if self._step is not None or self._is_working:
            raise ValueError("the training world has been started; only a new incarnation can start again")
        with self._working("checkpoint"):
            restore_step = await asyncio.to_thread(self._find, message.restore_step)
            demonstrations, self._demonstrations = tuple(self._demonstrations), []
            reply = await self._execute(
                Begin(
                    message.lineage,
                    restore_step,
                    demonstrations if restore_step is None else (),
                    message.compare,
                )
            )
        assert isinstance(reply, StartTrainingReply), reply
        self._step = reply.snapshot.version.step
        return reply

    @contextlib.contextmanager
    def _working(self, busy: str) -> Iterator[None]:
        assert not self._is_working
        self._is_working = True
        self._progress.busy = busy
        try:
            yield
        finally:
            self._is_working = False

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
        with self._working("training"):
            reply = await self._execute(step)
        assert isinstance(reply, TrainStepReply), reply
        self._step = reply.snapshot.version.step
        self._samples = {step: held for step, held in self._samples.items() if step >= self._step}
        reply.metrics["samples_repeated"] = float(repeated)
        return reply

    def _checked_step(self, message: TrainStep) -> dict[int, Sample]:
        self._check_free(f"step {message.step} cannot be trained")
        if self._is_offloaded:
            raise ValueError(
                f"step {message.step} cannot be trained: the training state is off its devices; restore it first"
            )
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

    def _check_free(self, what: str) -> None:
        if self._step is None or self._is_working:
            doing = f": {self._progress.busy}" if self._is_working else " (it was not started)"
            raise ValueError(f"{what} while the world starts or works{doing}")

    # lending the devices

    async def _offload(self, message: Offload) -> Reply:
        self._check_free("the training state cannot leave")
        self._is_offloaded = True
        with self._working("offloading"):
            return await self._execute(message)

    async def _restore(self, message: Restore) -> Reply:
        self._check_free("the training state cannot come back")
        with self._working("restoring"):
            reply = await self._execute(message)
        self._is_offloaded = False
        return reply
