"""The training world: one task a process, its start with the warm start's demonstrations, and its steps.

It also keeps the newest snapshot's metadata, which is what weight updates are made of.
"""

import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from pearl.runtime.errors import FinalError, PeerGoneError, QueueFullError, RemoteError
from pearl.runtime.rpc_server import RpcServer
from pearl.runtime.token_store import TokenStore
from pearl.service.clients.environment_pool import DEMONSTRATIONS_PER_ASK, EnvironmentPool
from pearl.service.loop.inbox import Inbox
from pearl.service.processes.process_manager import ManagedProcess, ProcessManager
from pearl.service.processes.process_specs import ProcessSpecs
from pearl.types import commands, events
from pearl.types.config import Config
from pearl.types.messages import training as messages
from pearl.types.weights import Snapshot, Version

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Of samples or demonstrations in one message: small enough that heartbeats are not held up behind it."""
BYTES_PER_TOKEN = 10  # of a sample: id 4, log-prob 4, mask 1, current 1
PIECE_ANSWER_S = 60.0
SETTLE_PERIOD_S = 0.1
Spawn = Callable[[str, Coroutine[Any, Any, None]], object]
Packed = TypeVar("Packed", messages.Sample, messages.Demonstration)
Moved = TypeVar("Moved", messages.OffloadReply, messages.RestoreReply)
Failures = (PeerGoneError, QueueFullError, RemoteError, TimeoutError)


class TrainingClient:
    def __init__(
        self,
        config: Config,
        server: RpcServer,
        specs: ProcessSpecs,
        processes: ProcessManager,
        store: TokenStore,
        environments: EnvironmentPool,
        inbox: Inbox,
        spawn: Spawn,
        say: Callable[[str], None],
        reach_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """``reach_step`` is told the step of each new version, once it is on its way to the core."""
        self._config = config
        self._server = server
        self._specs = specs
        self._processes = processes
        self._store = store
        self._environments = environments
        self._inbox = inbox
        self._spawn = spawn
        self._announce = say
        self._reach_step = reach_step
        self.snapshot: Snapshot | None = None  # the newest; None while no training world holds one
        self.checkpoint_step: int | None = None  # of the newest checkpoint that was written here
        self._peer = ""  # of the newest process
        self._is_comparing = config.agreement.at_start and config.training.engine != "emulated"

    # lives

    def start(self, command: commands.StartTrainer) -> None:
        self._spawn(f"StartTrainer {command.incarnation}", self._live(command))

    async def _live(self, command: commands.StartTrainer) -> None:
        process = self._specs.training(command.incarnation)
        self._peer = process.name
        if await self._processes.start(process) is not None:
            self._spawn(f"StartTraining {command.incarnation}", self._prepare(command, process))
        loss = await self._processes.wait_exited(process)
        self.snapshot = None
        await self._inbox.put(events.TrainerLost(command.incarnation, loss.reason, loss.is_final))

    def stop(self, command: commands.StopTrainer) -> None:
        process = self._processes.find("training", 0, command.incarnation)
        if process is not None:
            process.terminate(command.reason, command.grace_s)

    async def await_liveness_known(self, snapshot: Snapshot) -> None:
        """A worker could not reach the snapshot's source: return once it is plain whether that world managed. Soon when
        it is connected; else when its loss is on its way to the core, or silence would have meant death."""
        clock = self._server.clock
        give_up_at = clock.now() + self._config.runtime.heartbeat_timeout_s
        await clock.sleep(SETTLE_PERIOD_S)  # in which the end of a connection comes to be known
        while self._is_in_doubt(snapshot) and clock.now() < give_up_at:
            await clock.sleep(SETTLE_PERIOD_S)

    def _is_in_doubt(self, snapshot: Snapshot) -> bool:
        newest = self.snapshot
        is_same = newest is not None and newest.version == snapshot.version
        return is_same and not self._server.is_connected(self._peer)

    async def _prepare(self, command: commands.StartTrainer, process: ManagedProcess) -> None:
        warm_start = self._config.warm_start
        try:
            if command.restore_step is None and warm_start.num_steps > 0:
                await self._send_demonstrations(process.name, warm_start.num_demonstrations)
                self._announce(
                    f"trainer: warm start, {warm_start.num_steps} steps on the expert's demonstrations"
                )
            request = messages.StartTraining(command.lineage, command.restore_step, self._is_comparing)
            limit_s = self._config.runtime.train_timeout_s
            reply = await self._server.call(
                process.name, request, deadline_s=limit_s, reply_type=messages.StartTrainingReply
            )
        except Failures as error:
            text, is_final = _explained(error)
            process.terminate(f"did not start training: {text}", is_final=is_final)
            return
        self.snapshot = snapshot = reply.snapshot
        text = " ".join(f"{name} {value:.4g}" for name, value in sorted(reply.metrics.items()))
        origin = ", restored from its checkpoint" if reply.restored else ""
        self._announce(
            f"trainer: ready with version {snapshot.version}{origin}" + (f"  {text}" if text else "")
        )
        if reply.comparison is not None:
            self._is_comparing = False
            await self._inbox.put(events.Compared("training", reply.comparison))
        await self._inbox.put(
            events.TrainerReady(command.op, command.incarnation, snapshot.version, snapshot.checksum)
        )
        self._reach_step(snapshot.version.step)

    async def _send_demonstrations(self, peer: str, count: int) -> None:
        for first in range(0, count, DEMONSTRATIONS_PER_ASK):
            asked = min(DEMONSTRATIONS_PER_ASK, count - first)
            made = await self._environments.demonstrations(first, asked)
            for piece in pieces(made, lambda one: len(one.ids) + len(one.weights)):
                await self._server.call(peer, messages.AddDemonstrations(piece), deadline_s=PIECE_ANSWER_S)

    # steps

    def train(self, command: commands.Train) -> None:
        self._spawn(f"Train {command.op}", self._train(command))

    async def _train(self, command: commands.Train) -> None:
        process = self._processes.find("training", 0, command.incarnation)
        if process is None:
            return  # its loss has been told
        try:
            reply = await self._ask_step(process.name, command)
        except Failures as error:
            text, is_final = _explained(error)
            process.terminate(f"step {command.step} failed: {text}", is_final=is_final)
            return
        self.snapshot = snapshot = reply.snapshot
        if reply.checkpoint_step is not None:
            self.checkpoint_step = reply.checkpoint_step
        await self._inbox.put(
            events.TrainFinished(
                command.op,
                command.incarnation,
                snapshot.version,
                snapshot.checksum,
                reply.checkpoint_step,
                reply.metrics,
                reply.max_logprob_gap,
                reply.logprob_gap_tokens,
            )
        )
        self._reach_step(snapshot.version.step)

    async def _ask_step(self, peer: str, command: commands.Train) -> messages.TrainStepReply:
        assert self.snapshot is not None, "nothing is trained before the trainer is ready"
        version = self.snapshot.version
        assert version.step == command.step, (version, command.step)
        samples = (self._sample(sample, version) for sample in command.samples)
        for piece in pieces(samples, lambda one: one.num_tokens * BYTES_PER_TOKEN):
            await self._server.call(peer, messages.AddSamples(command.step, piece), deadline_s=PIECE_ANSWER_S)
        request = messages.TrainStep(command.step, len(command.samples), command.checkpoint)
        limit_s = self._config.runtime.train_timeout_s
        reply: messages.TrainStepReply = await self._server.call(
            peer, request, deadline_s=limit_s, reply_type=messages.TrainStepReply
        )
        return reply

    # lending its GPUs

    def offload(self, command: commands.OffloadTraining) -> None:
        self._spawn(f"OffloadTraining {command.op}", self._offload(command))

    async def _offload(self, command: commands.OffloadTraining) -> None:
        began = self._server.clock.now()
        reply = await self._ask_idle(command.incarnation, messages.Offload(), messages.OffloadReply)
        if reply is not None:
            seconds = self._server.clock.now() - began
            await self._inbox.put(
                events.TrainingOffloaded(command.op, command.incarnation, seconds, reply.parts)
            )

    def restore(self, command: commands.RestoreTraining) -> None:
        self._spawn(f"RestoreTraining {command.op}", self._restore(command))

    async def _restore(self, command: commands.RestoreTraining) -> None:
        began = self._server.clock.now()
        reply = await self._ask_idle(command.incarnation, messages.Restore(), messages.RestoreReply)
        if reply is not None:
            seconds = self._server.clock.now() - began
            await self._inbox.put(
                events.TrainingRestored(command.op, command.incarnation, seconds, reply.parts)
            )

    async def _ask_idle(
        self, incarnation: int, request: messages.Offload | messages.Restore, reply_type: type[Moved]
    ) -> Moved | None:
        """The answer; without one the world is condemned, since what its devices hold is not known any more."""
        process = self._processes.find("training", 0, incarnation)
        if process is None:
            return None  # its loss has been told
        limit_s = self._config.runtime.train_timeout_s
        try:
            return await self._server.call(process.name, request, deadline_s=limit_s, reply_type=reply_type)
        except Failures as error:
            process.terminate(f"{type(request).__name__} failed: {error}")
            return None

    def _sample(self, sample: commands.TrainSample, version: Version) -> messages.Sample:
        head = (sample.trajectory, sample.group, sample.reward, sample.masked)
        if sample.tokens == 0:
            return messages.Sample(*head, 0, b"", b"", b"", b"")
        view = self._store.view(sample.trajectory)
        assert view.num_tokens == sample.tokens, (sample, view.num_tokens)
        return messages.Sample(
            *head, view.num_tokens, view.ids, view.mask, view.logprobs, view.current(version)
        )


def pieces(
    items: Iterable[Packed], size: Callable[[Packed], int], limit_bytes: int = PIECE_BYTES
) -> Iterator[tuple[Packed, ...]]:
    """Cut into runs of at most ``limit_bytes``; an item that is larger has a piece to itself."""
    piece: list[Packed] = []
    total = 0
    for item in items:
        if piece and total + size(item) > limit_bytes:
            yield tuple(piece)
            piece, total = [], 0
        piece.append(item)
        total += size(item)
    if piece:
        yield tuple(piece)


def _explained(error: Exception) -> tuple[str, bool]:
    """Return the text of a failure, and whether another try would meet it again."""
    if isinstance(error, RemoteError) and error.kind == FinalError.__name__:
        return error.text, True
    return str(error), False
