"""A rollout worker between its engine and the coordinator: requests in, frames out, weights and memory on command.

An update never leaves a worker in doubt: it is answered by the checksum of the weights now served, or by an error
that names the worker and says what was wrong. When the snapshot did not arrive, the old version goes on being
served; when the engine refused it, the engine serves nothing until a whole good update.

A released worker has no device memory and no weights. Whatever reaches it ends at once as "abort" with nothing, from
the moment the release came until an activation is done; an activation that fails leaves it released.
"""

import asyncio
import logging
from typing import Protocol, assert_never

import msgspec

from pearl.runtime.rpc_client import RpcClient
from pearl.types.comparison import Comparison
from pearl.types.config import Config
from pearl.types.messages.control import Heartbeat
from pearl.types.messages.rollout import (
    Abort,
    Activate,
    ActivateReply,
    Generate,
    Interrupt,
    Release,
    ReleaseReply,
    SetRole,
    SetRoleReply,
    UpdateWeights,
    UpdateWeightsReply,
)
from pearl.types.weights import SourceLostError, SupersededVersionError, UpdateMode
from pearl.workers.memory_offload.errors import ResidencyError
from pearl.workers.rollout.exclusive_operation import ExclusiveOperation, StoppedError
from pearl.workers.rollout.live_requests import Requests
from pearl.workers.rollout.protocol import Engine, MemoryTag, UnsupportedError
from pearl.workers.rollout.snapshot_protocol import Received, Receiver
from pearl.workers.rollout.weight_loader import WeightLoader
from pearl.workers.weight_transfer.errors import SourceGoneError, SupersededError, TransferError

log = logging.getLogger(__name__)

Message = Generate | Abort | UpdateWeights | Interrupt | Release | Activate | SetRole
"""What a rollout worker is told and asked."""
WEIGHTS: tuple[MemoryTag, ...] = ("weights",)
CACHES: tuple[MemoryTag, ...] = ("kv_cache", "cuda_graph")
FAILURES = (ValueError, TimeoutError, TransferError, ResidencyError, StoppedError, UnsupportedError)
"""Ways in which a change of weights, memory or role may fail: answers, not bugs."""


class EngineComparison(Protocol):
    """See ``pearl.workers.rollout.comparison``; nothing heavy is imported for it here."""

    def keep(self, received: Received) -> None:
        """Take what it needs of an update's bytes while they are there. Blocking."""
        ...

    async def run(self) -> Comparison:
        """Run the operation on the engine, which serves that update by now."""
        ...


class RolloutService:
    def __init__(
        self,
        config: Config,
        name: str,
        engine: Engine,
        receiver: Receiver,
        comparison: EngineComparison | None = None,
    ) -> None:
        """``comparison`` compares the engine with plain ``transformers``; without one it is not compared."""
        self._config = config
        self._comparison = comparison
        self._name = name  # rollout.SLOT.INCARNATION, as errors call it
        self._engine = engine
        self._requests = Requests(config.rollout, name, engine)
        self._weights = WeightLoader(engine, receiver, config.weights.transport)
        self._exclusive = ExclusiveOperation()
        self._is_released = False  # takes no requests: released, or on the way there or back
        self._num_changes = 0

    def connect(self, peer: RpcClient) -> None:
        """Set the client that sends frames, which must be out before an answer."""
        self._requests.connect(peer)

    async def start(self) -> None:
        await self._engine.start()
        self._num_changes += 1
        log.info("%s: engine %s started", self._name, self._engine.name)

    async def send_frames(self, peer: RpcClient) -> None:
        """Send frames until the client has ended."""
        self._requests.connect(peer)
        await self._requests.send_frames()

    async def handle(self, message: Message) -> msgspec.Struct | None:
        match message:
            case Generate():
                await self._generate(message)
            case Abort():
                await self._engine.abort(message.attempt)
            case Interrupt():
                await self._requests.abort_all()
            case UpdateWeights():
                return await self._update(message)
            case Release():
                return await self._release()
            case Activate():
                return await self._activate(message)
            case SetRole():
                return await self._set_role(message)
            case _:
                assert_never(message)
        return None

    def heartbeat(self) -> Heartbeat:
        current = self._exclusive.current
        progress = self._requests.num_deltas + self._num_changes
        return Heartbeat(progress, current or "", self._requests.num_live + (current is not None))

    async def _generate(self, message: Generate) -> None:
        if self._is_released or self._exclusive.current is not None:
            self._requests.refuse(message.attempt, "abort")
        else:
            await self._requests.generate(message)

    # Weights

    async def _update(self, message: UpdateWeights) -> UpdateWeightsReply:
        version = message.snapshot.version
        try:
            limit_s = self._config.runtime.update_timeout_s * (2 if message.compare else 1)
            async with self._exclusive.run("updating", limit_s):
                return await self._take(message)
        except SupersededError as error:
            raise SupersededVersionError(f"{self._name}: {error}") from error
        except SourceGoneError as error:
            raise SourceLostError(f"{self._name}: {version} was not taken: {error}") from error
        except FAILURES as error:
            raise ValueError(f"{self._name}: {version} was not taken: {error}") from error

    async def _take(self, message: UpdateWeights) -> UpdateWeightsReply:
        if self._is_released:
            raise ValueError("its memory is released; activate it")
        comparison = self._comparison if message.compare else None
        keep = None if comparison is None else comparison.keep
        loaded = await self._weights.take(
            message.snapshot, message.bucket_deadline_s, lambda: self._quiet(message.mode), keep
        )
        await self._resume()
        compared = None if comparison is None else await comparison.run()
        version = message.snapshot.version
        log.info("%s: serves %s after %.3f s of loading", self._name, version, loaded.load_s)
        return UpdateWeightsReply(version, loaded.checksum, loaded.transfer_s, loaded.load_s, compared)

    async def _quiet(self, mode: UpdateMode) -> None:
        match mode:
            case "interrupt":
                await self._engine.pause("abort")
            case "in_place":
                await self._engine.pause("in_place")
            case "drain":
                await self._requests.idle()
                await self._engine.pause("abort")
            case _:
                assert_never(mode)

    async def _resume(self) -> None:
        await self._engine.continue_generation()
        self._num_changes += 1
        await self._requests.send_frame()

    # Role

    async def _set_role(self, message: SetRole) -> SetRoleReply:
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit_s = message.drain_limit_s
        try:
            async with self._exclusive.run("switching", limit_s + self._config.runtime.update_timeout_s):
                await self._drain(limit_s)
                await self._engine.set_role(message.role)
        except FAILURES as error:
            raise ValueError(f"{self._name}: stays {self._engine.role}: {error}") from error
        self._num_changes += 1
        seconds = loop.time() - began
        log.info("%s: serves as %s after %.3f s", self._name, message.role, seconds)
        return SetRoleReply(message.role, seconds)

    async def _drain(self, limit_s: float) -> None:
        """New requests are refused meanwhile."""
        try:
            async with asyncio.timeout(limit_s) as scope:
                await self._requests.idle()
        except TimeoutError:
            if not scope.expired():
                raise
            count = self._requests.num_live
            raise ValueError(f"{count} requests still run after {limit_s:g} s of draining") from None

    # Memory

    async def _release(self) -> ReleaseReply:
        self._is_released = True
        self._exclusive.stop()
        try:
            async with self._exclusive.run("releasing", self._config.elastic.release_limit_s):
                return await self._let_go()
        except FAILURES as error:
            raise ValueError(f"{self._name}: not released: {error}") from error

    async def _let_go(self) -> ReleaseReply:
        self._is_released = True  # an activation may have been done in the last moment
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._engine.pause("abort")
        await self._requests.idle()
        await self._requests.send_frame()
        interrupt_s = loop.time() - began
        began = loop.time()
        await self._engine.flush_cache()
        released = await self._engine.release(WEIGHTS + CACHES)
        seconds = loop.time() - began
        self._num_changes += 1
        num_bytes = 0 if released is None else released.num_bytes
        verify_s = 0.0 if released is None else released.verify_s
        log.info("%s: released %d bytes in %.3f s", self._name, num_bytes, interrupt_s + seconds)
        return ReleaseReply(
            num_bytes, {"interrupt": interrupt_s, "release": seconds - verify_s, "verify": verify_s}
        )

    async def _activate(self, message: Activate) -> ActivateReply:
        self._is_released = True  # whatever comes of it: it serves only when all is done
        try:
            limit_s = self._config.runtime.update_timeout_s * (2 if message.compare else 1)
            async with self._exclusive.run("activating", limit_s):
                reply = await self._wake(message)
                self._is_released = False
                return reply
        except FAILURES as error:
            if not isinstance(error, StoppedError):  # then the release takes everything back itself
                await self._release()
            raise ValueError(
                f"{self._name}: {message.snapshot.version} was not activated: {error}; it is released"
            ) from error

    async def _wake(self, message: Activate) -> ActivateReply:
        loop = asyncio.get_running_loop()
        await self._engine.pause("abort")
        began = loop.time()
        await self._engine.restore(WEIGHTS)
        parts = {"weights_memory": loop.time() - began}
        comparison = self._comparison if message.compare else None
        keep = None if comparison is None else comparison.keep
        loaded = await self._weights.take(
            message.snapshot, message.bucket_deadline_s, self._requests.idle, keep
        )
        parts |= {"transfer": loaded.transfer_s, "load": loaded.load_s}
        began = loop.time()
        await self._engine.restore(CACHES)
        parts["kv_memory"] = loop.time() - began
        await self._resume()
        compared = None if comparison is None else await comparison.run()
        log.info("%s: active with %s after %.3f s", self._name, message.snapshot.version, sum(parts.values()))
        return ActivateReply(message.snapshot.version, loaded.checksum, parts, compared)
