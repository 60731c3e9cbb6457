"""A rollout worker between its engine and the coordinator: requests in, frames out, weights taken.

An update never leaves a worker in doubt: it is answered by the checksum of the weights now served, or by an error
that names the worker and says what was wrong. When the snapshot did not arrive, the old version goes on being
served; when the engine refused it, the engine serves nothing until a whole good update.
"""

import asyncio
import contextlib
import logging
from typing import assert_never

import msgspec
import numpy as np

from pearl.runtime.errors import PeerGoneError
from pearl.runtime.peer import Peer
from pearl.state.config import Config
from pearl.state.messages.control import Heartbeat
from pearl.state.messages.rollout import Abort, Generate, UpdateWeights, UpdateWeightsReply
from pearl.state.trajectory import FinishReason
from pearl.state.weights import Snapshot, UpdateMode
from pearl.workers.links.errors import TransferError
from pearl.workers.rollout.frames import FrameBuilder
from pearl.workers.rollout.protocol import Delta, Engine, GenerateRequest
from pearl.workers.rollout.receiving import Received, Receiver

log = logging.getLogger(__name__)

Message = Generate | Abort | UpdateWeights
"""What a rollout worker is told and asked."""


class RolloutService:
    def __init__(self, config: Config, name: str, engine: Engine, receiver: Receiver) -> None:
        self._config = config
        self._name = name  # rollout.SLOT.INCARNATION, as errors call it
        self._engine = engine
        self._receiver = receiver
        self._started = asyncio.Event()
        self._live: set[int] = set()  # attempts without their last delta
        self._idle = asyncio.Event()
        self._idle.set()
        self._frames = FrameBuilder()
        self._has_frame = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._sending = asyncio.Lock()  # frames leave in their order
        self._update = asyncio.Lock()
        self._num_progress = 0
        self._num_adds = 0

    async def start(self) -> None:
        await self._engine.start()
        self._num_progress += 1
        self._started.set()
        log.info("%s: engine %s started", self._name, self._engine.name)

    async def handle(self, message: Message) -> msgspec.Struct | None:
        await self._started.wait()
        match message:
            case Generate():
                await self._generate(message)
            case Abort():
                await self._engine.abort(message.attempt)
            case UpdateWeights():
                return await self._update_weights(message)
            case _:
                assert_never(message)
        return None

    def heartbeat(self) -> Heartbeat:
        busy = "" if self._started.is_set() else "starting"
        if self._update.locked():
            busy = "updating"
        return Heartbeat(self._num_progress, busy, len(self._live) + self._update.locked())

    # Requests

    async def _generate(self, message: Generate) -> None:
        if self._update.locked():
            self._refuse(message.attempt, "abort", "")
            return
        if len(message.ids) % 4:
            self._refuse(message.attempt, "error", f"{len(message.ids)} bytes are no int32 ids")
            return
        ids = np.frombuffer(message.ids, "<i4")
        request = GenerateRequest(message.attempt, ids, message.params, message.seed, message.pair)
        is_repeat = message.attempt in self._live
        self._live.add(message.attempt)
        self._idle.clear()
        try:
            await self._engine.generate(request, self._emit)
        except ValueError as error:
            # Its one answer is given by the first try, now or earlier; a second end would be credited twice.
            log.warning("%s: dropped a request: %s", self._name, error)
            if not is_repeat:
                self._forget(message.attempt)

    def _refuse(self, attempt: int, finish: FinishReason, error: str) -> None:
        """An attempt that the engine never saw ends with nothing."""
        self._emit(Delta(attempt, [], [], [], 0, finish, error))

    def _emit(self, delta: Delta) -> None:
        self._frames.add(delta)
        self._has_frame.set()
        self._num_adds += 1
        self._num_progress += 1
        if delta.finish is not None:
            self._forget(delta.attempt)
        if self._frames.has_finished or self._num_adds >= self._frame_deltas():
            self._is_urgent.set()

    def _forget(self, attempt: int) -> None:
        self._live.discard(attempt)
        if not self._live:
            self._idle.set()

    def _frame_deltas(self) -> int:
        """Deltas that add up to ``frame_iterations`` passes: each gives every live attempt at most one."""
        return self._config.rollout.frame_iterations * max(1, len(self._live))

    async def send_frames(self, peer: Peer) -> None:
        """Until the peer has ended: a frame when an attempt finished, or after the frame's period or passes."""
        with contextlib.suppress(PeerGoneError):
            while True:
                await self._has_frame.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.rollout.frame_period_s):
                        await self._is_urgent.wait()
                await self._send_frame(peer)

    async def _send_frame(self, peer: Peer) -> None:
        async with self._sending:
            if self._frames:
                self._has_frame.clear()
                self._is_urgent.clear()
                self._num_adds = 0
                await peer.tell(self._frames.take(self._engine.iteration_stats()))

    # Weights

    def connect(self, peer: Peer) -> None:
        """Where frames go that must be out before an answer."""
        self._peer = peer

    async def _update_weights(self, message: UpdateWeights) -> UpdateWeightsReply:
        limit_s = self._config.runtime.update_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._update:
                return await self._take(message)
        except TimeoutError:
            raise ValueError(
                f"{self._name}: the update to {message.snapshot.version} took over {limit_s:g} s"
            ) from None
        except (ValueError, TransferError) as error:
            raise ValueError(f"{self._name}: {message.snapshot.version} was not taken: {error}") from error

    async def _take(self, message: UpdateWeights) -> UpdateWeightsReply:
        """The engine goes on while the snapshot arrives; it is stopped for the loading only."""
        snapshot = message.snapshot
        transport = self._config.weights.transport
        with await self._receiver.receive_async(
            snapshot, transport=transport, deadline_s=message.bucket_deadline_s
        ) as received:
            await self._quiet(message.mode)
            loop = asyncio.get_running_loop()
            began = loop.time()
            checksum = await self._load(received)
            load_seconds = loop.time() - began
            transfer_seconds = received.seconds
        if checksum != snapshot.checksum:
            raise ValueError(
                f"checksum {checksum} after loading, published {snapshot.checksum}; serving stopped"
            )
        await self._engine.continue_generation()
        self._num_progress += 1
        await self._send_frame(self._peer)
        log.info("%s: serves %s after %.3f s of loading", self._name, snapshot.version, load_seconds)
        return UpdateWeightsReply(snapshot.version, checksum, transfer_seconds, load_seconds)

    async def _quiet(self, mode: UpdateMode) -> None:
        match mode:
            case "interrupt":
                await self._engine.pause("abort")
            case "in_place":
                await self._engine.pause("in_place")
            case "drain":
                await self._idle.wait()
                await self._engine.pause("abort")
            case _:
                assert_never(mode)

    async def _load(self, received: Received) -> str:
        snapshot: Snapshot = received.snapshot
        await self._engine.begin_update(snapshot.version, snapshot.tensors)
        for bucket, data in received:
            await self._engine.update_bucket(bucket, data)
        return await self._engine.end_update()
