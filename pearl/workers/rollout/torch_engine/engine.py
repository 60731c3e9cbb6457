"""The torch engine behind the protocol: an ``EngineCore`` in a thread of its own.

Everything that touches the core is a call handed to that thread and done between two iterations, in the order of
arrival; so nothing needs a lock, and a pause has taken hold when its call returns. Deltas reach the event loop once
an iteration. The inbox is bounded by what the callers await: each holds one entry until it is answered.
"""

import asyncio
import logging
import queue
from collections.abc import Callable
from typing import TypeVar

from transformers import PreTrainedModel

from pearl.runtime.vital_thread import VitalThread
from pearl.types.error_text import error_text
from pearl.types.messages.rollout import IterationStat
from pearl.types.weights import BucketSpec, TensorSpec, Version
from pearl.workers.memory_offload.saver import Saver
from pearl.workers.rollout.attempts import LiveAttempts
from pearl.workers.rollout.engine_core import State
from pearl.workers.rollout.kv_transfer.transport import KvTransport
from pearl.workers.rollout.protocol import (
    Delta,
    Emit,
    EngineLoad,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    Released,
    Role,
    UnsupportedError,
)
from pearl.workers.rollout.torch_engine.core import EngineCore
from pearl.workers.rollout.torch_engine.kv_pages import EnginePages
from pearl.workers.rollout.torch_engine.settings import EngineSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
JOIN_LIMIT_S = 10.0
"""An iteration that takes longer at shutdown is left to die with the process: the thread is a daemon."""


class TorchEngine:
    """See ``pearl.workers.rollout.protocol.Engine``; with a transport it takes all roles, otherwise one."""

    name = "torch"

    def __init__(
        self,
        build: Callable[[], PreTrainedModel],
        settings: EngineSettings,
        count_tokens: Callable[[int], None] | None = None,
        saver: Saver | None = None,
        transport: KvTransport | None = None,
        role: Role = "colocated",
    ) -> None:
        """``build`` makes the model when the engine starts; ``count_tokens`` is told how many tokens each iteration
        sampled before they are emitted; ``saver`` takes device memory and gives it back (None = the device's own).
        All are called in the engine's thread. ``transport`` hands KV over and is closed with the engine; ``role`` is
        the first one."""
        if role != "colocated" and transport is None:
            raise UnsupportedError(f"the torch engine takes the role {role} only with a KV transport")
        self.role = role
        self._transport = transport
        self._count_tokens = count_tokens
        self._saver = saver
        self._build = build
        self._settings = settings
        self._core: EngineCore | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = VitalThread(target=self._run, name="torch-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attempts = LiveAttempts()
        self._failure = ""

    @property
    def state(self) -> State:
        return self._core.state if self._core else "empty"

    @property
    def version(self) -> Version | None:
        return self._core.version if self._core else None

    @property
    def num_iterations(self) -> int:
        """Grows with every iteration: progress, as heartbeats report it."""
        return self._core.num_iterations if self._core else 0

    async def start(self) -> None:
        assert self._loop is None, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._core = await self._call(
            lambda: EngineCore(self._build(), self._settings, self._count_tokens, self._saver)
        )
        self._core.role = self.role
        if self._transport is not None:
            self._transport.start(EnginePages(self._core, self._call))

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        core = self._started()
        self._attempts.add(request.attempt, emit)
        if self._failure:
            self._attempts.deliver([Delta(request.attempt, [], [], [], 0, "error", self._failure)])
            return
        self._inbox.put(lambda: core.submit(request))

    async def abort(self, attempt: int) -> None:
        core = self._started()
        await self._call(lambda: core.abort(attempt))

    async def pause(self, mode: PauseMode) -> None:
        core = self._started()
        await self._call(lambda: core.pause(mode))

    async def continue_generation(self) -> None:
        await self._call(self._started().resume)

    async def flush_cache(self) -> None:
        await self._call(self._started().flush)

    async def begin_update(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        """Holds all iterations by itself, whether paused or not: a continue in between takes effect at the end."""
        core = self._started()
        await self._call(lambda: core.begin_update(version, tensors))

    async def update_bucket(self, bucket: BucketSpec, data: memoryview) -> None:
        """``data`` may be reused when this returns."""
        core = self._started()
        await self._call(lambda: core.update_bucket(bucket, data))

    async def end_update(self) -> str:
        return await self._call(self._started().end_update)

    async def checksum(self) -> str:
        return await self._call(self._started().checksum)

    async def release(self, tags: tuple[MemoryTag, ...]) -> Released:
        core = self._started()
        return await self._call(lambda: core.release(tags))

    async def restore(self, tags: tuple[MemoryTag, ...]) -> None:
        core = self._started()
        await self._call(lambda: core.restore(tags))

    async def set_role(self, role: Role) -> None:
        if role == self.role:
            return
        if self._transport is None:
            raise UnsupportedError(f"the torch engine cannot take the role {role}: it has no KV transport")
        core = self._started()
        await self._call(lambda: core.set_role(role))
        self.role = role

    def is_idle(self) -> bool:
        return not self._attempts

    def load(self) -> EngineLoad:
        return self._started().load()

    def iteration_stats(self) -> list[IterationStat]:
        return self._started().take_stats()

    async def shutdown(self) -> None:
        """Ends the thread; attempts still running get no further delta. Harmless when repeated."""
        if self._transport is not None:
            await asyncio.to_thread(self._transport.close)
        self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_LIMIT_S)

    def _started(self) -> EngineCore:
        assert self._core is not None, "start the engine first"
        return self._core

    async def _call(self, function: Callable[[], T]) -> T:
        """The result of ``function``, done in the engine's thread between two iterations. From any event loop."""
        loop = asyncio.get_running_loop()
        if not self._thread.is_alive():
            raise ValueError("the engine was shut down")
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = function()
            # Whatever went wrong belongs to the caller, who awaits it; the thread serves on.
            except Exception as error:  # noqa: BLE001
                self._flush()
                self._post(loop, _resolve, future, None, error)
            else:
                self._flush()  # first what the call brought about, then that it is done
                self._post(loop, _resolve, future, result, None)

        self._inbox.put(work)
        return await future

    # In the engine's thread

    def _run(self) -> None:
        is_busy = False
        while True:
            try:
                work = self._inbox.get(block=not is_busy)
            except queue.Empty:
                is_busy = self._step()
                continue
            if work is None:
                return
            work()
            is_busy = self._core is not None  # whatever it was may have brought work, or made room for some

    def _step(self) -> bool:
        """False when nothing can be computed until the next call."""
        core = self._started()
        try:
            did_work = core.step()
        # A bug in here must not leave callers waiting: all that runs ends, and nothing more is taken.
        except Exception as error:
            log.exception("the engine failed")
            self._failure = f"the torch engine failed and serves no more: {error_text(error)}"
            core.state = "invalid"
            core.end_all("error", self._failure)
            did_work = False
        self._flush()
        return did_work

    def _flush(self) -> None:
        core = self._core
        if core is not None and core.stages.notices:
            notices, core.stages.notices = core.stages.notices, []
            assert self._transport is not None
            self._transport.post(notices)
        if core is not None and core.deltas:
            deltas, core.deltas = core.deltas, []
            assert self._loop is not None
            self._post(self._loop, self._attempts.deliver, deltas)

    def _post(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object
    ) -> None:
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            if loop is self._loop:
                self._inbox.put(None)


def _resolve(future: "asyncio.Future[T]", result: T, error: Exception | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
