"""A rollout worker's requests: into the engine, and what they make out to the coordinator in frames.

Each attempt ends once. Frames leave in their order; what ended attempts made can be sent before an answer is.
"""

import asyncio
import contextlib
import logging

import numpy as np

from pearl.runtime.errors import PeerGoneError
from pearl.runtime.rpc_client import RpcClient
from pearl.types.config import RolloutConfig
from pearl.types.error_text import error_text
from pearl.types.messages.rollout import Generate
from pearl.types.trajectory import FinishReason
from pearl.workers.rollout.frame_builder import FrameBuilder
from pearl.workers.rollout.protocol import Delta, Engine, GenerateRequest

log = logging.getLogger(__name__)


class Requests:
    def __init__(self, config: RolloutConfig, name: str, engine: Engine) -> None:
        self._config = config
        self._name = name
        self._engine = engine
        self._live: set[int] = set()  # attempts without their last delta
        self._idle = asyncio.Event()
        self._idle.set()
        self._frames = FrameBuilder()
        self._has_frame = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._sending = asyncio.Lock()
        self._num_adds = 0  # since the last frame
        self.num_deltas = 0

    def connect(self, peer: RpcClient) -> None:
        """Set the client that sends the frames."""
        self._peer = peer

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def idle(self) -> None:
        await self._idle.wait()

    async def generate(self, message: Generate) -> None:
        if len(message.ids) % 4:
            self.refuse(message.attempt, "error", f"{len(message.ids)} bytes are no int32 ids")
            return
        ids = np.frombuffer(message.ids, "<i4")
        request = GenerateRequest(message.attempt, ids, message.params, message.seed, message.pair)
        is_repeat = message.attempt in self._live
        self._live.add(message.attempt)
        self._idle.clear()
        try:
            await self._engine.generate(request, self._emit_live)
        except ValueError as error:
            # Its one answer is given by the first try, now or earlier; a second end would be credited twice.
            log.warning("%s: dropped a request: %s", self._name, error)
            if not is_repeat:
                self._forget(message.attempt)
        # Whatever one request makes an engine raise is that request's end: its neighbours go on.
        except Exception as error:
            log.exception("%s: the engine did not take attempt %d", self._name, message.attempt)
            if not is_repeat and message.attempt in self._live:
                self.refuse(message.attempt, "error", f"{type(error).__name__}: {error_text(error)}")

    def refuse(self, attempt: int, finish: FinishReason, error: str = "") -> None:
        """An attempt that the engine never saw ends with nothing."""
        self._emit(Delta(attempt, [], [], [], 0, finish, error))

    async def abort_all(self) -> None:
        """End every attempt with what it made, and send that. All at once: each takes hold between two iterations."""
        async with asyncio.TaskGroup() as group:
            for attempt in self._live:
                group.create_task(self._engine.abort(attempt), name=f"abort {attempt}")
        await self.send_frame()

    def _emit_live(self, delta: Delta) -> None:
        """Pass on the engine's delta unless the attempt's end has been reported already."""
        if delta.attempt in self._live:
            self._emit(delta)

    def _emit(self, delta: Delta) -> None:
        self._frames.add(delta)
        self._has_frame.set()
        self._num_adds += 1
        self.num_deltas += 1
        if delta.is_last:
            self._forget(delta.attempt)
        if self._frames.has_finished or self._num_adds >= self._frame_deltas():
            self._is_urgent.set()

    def _forget(self, attempt: int) -> None:
        self._live.discard(attempt)
        if not self._live:
            self._idle.set()

    def _frame_deltas(self) -> int:
        """Deltas that add up to ``frame_iterations`` iterations: each gives every live attempt at most one."""
        return self._config.frame_iterations * max(1, len(self._live))

    async def send_frames(self) -> None:
        """Send a frame whenever an attempt has finished or the frame's period or iterations are over, until the
        client ends."""
        with contextlib.suppress(PeerGoneError):
            while True:
                await self._has_frame.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.frame_period_s):
                        await self._is_urgent.wait()
                await self.send_frame()

    async def send_frame(self) -> None:
        """All that was made until now, if anything was."""
        async with self._sending:
            if self._frames:
                self._has_frame.clear()
                self._is_urgent.clear()
                self._num_adds = 0
                await self._peer.notify(self._frames.take(self._engine.iteration_stats()))
