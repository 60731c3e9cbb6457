"""SGLang behind the engine protocol.

It has weights ("ready") only between a whole update and whatever takes them away; requests are handed to SGLang only
while it is ready, not paused and has all its memory. Before anything that SGLang would not survive busy (a release, a
switch of role) it is drained and has said itself that it is idle.

An update in place keeps the KV of what runs. Its requests share KV under a key that names the version they began
with, so that nobody who comes later finds it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from pearl.types.messages.rollout import IterationStat
from pearl.types.weights import BucketSpec, TensorSpec, Version
from pearl.workers.memory_offload.errors import NotFreedError, ResidencyError
from pearl.workers.rollout.protocol import (
    Emit,
    EngineLoad,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    Released,
    Role,
    UnsupportedError,
)
from pearl.workers.rollout.request_checks import role_mismatch
from pearl.workers.rollout.sglang.api import SglangApi
from pearl.workers.rollout.sglang.client import ServerError
from pearl.workers.rollout.sglang.health import Health
from pearl.workers.rollout.sglang.iteration_meter import IterationMeter
from pearl.workers.rollout.sglang.loading import Loading
from pearl.workers.rollout.sglang.memory import held_bytes
from pearl.workers.rollout.sglang.model_files import Model
from pearl.workers.rollout.sglang.pair_rendezvous import PairRendezvous
from pearl.workers.rollout.sglang.paired_requests import PairedRequests
from pearl.workers.rollout.sglang.request_manager import CountTokens, RequestManager
from pearl.workers.rollout.sglang.requests import invalid_reason
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import SglangSettings

log = logging.getLogger(__name__)

State = Literal["empty", "updating", "invalid", "ready"]
IDLE_LIMIT_S = 10.0
"""From its last request's end until SGLang says that it is idle: KV of a failed transfer is held for a while."""


class SglangEngine:
    """See ``pearl.workers.rollout.protocol.Engine``."""

    name = "sglang"

    def __init__(
        self,
        settings: SglangSettings,
        server: Server,
        model: Callable[[], Model],
        group: asyncio.TaskGroup,
        *,
        start_limit_s: float,
        count_tokens: CountTokens | None = None,
        point: PairRendezvous | None = None,
        role: Role = "colocated",
    ) -> None:
        """``model`` writes the model's directory when the engine starts. A server that runs already is emptied,
        used and left running. The engine's tasks are in ``group``, which fails with EngineDiedError when SGLang does.
        ``point`` is where its stages of pairs are met, closed with the engine; without it, it is colocated only."""
        if role != "colocated" and point is None:
            raise UnsupportedError(f"the sglang engine takes the role {role} only with a meeting point")
        self.role = role
        self.state: State = "empty"
        self.version: Version | None = None
        self._settings = settings
        self._server = server
        self._model_of = model
        self._start_limit_s = start_limit_s
        self._group = group
        self._point = point
        self._meter = IterationMeter()
        self._running = RequestManager(group, self._meter, count_tokens)
        self._stages: PairedRequests | None = None
        if point is not None:
            self._stages = PairedRequests(group, self._running, point, lambda: server.bootstrap_port)
        self._watching: asyncio.Task[None] | None = None
        self._owns_server = False
        self._is_paused = False
        self._released: set[MemoryTag] = set()
        self._loading = Loading(settings)
        self._num_flushes = 0
        self._health = Health(lambda: self._api.loads(), self._on_failure)
        self._is_shut_down = False

    # Life

    async def start(self) -> None:
        self._model = await asyncio.to_thread(self._model_of)
        if not self._server.is_alive:
            self._owns_server = True
            await self._server.start(self.role, self._start_limit_s)
        self._connect()
        if not self._owns_server:
            await self._api.abort_all()
            await self._api.resume()
            await self._api.flush(IDLE_LIMIT_S)
        if self._point is not None:
            await self._point.start()
        self._watching = self._group.create_task(self._health.watch(), name="watch SGLang")

    def _connect(self) -> None:
        self._api = self._running.api = SglangApi(self._server.client)
        self._server.watch(self._health.fail)

    def _on_failure(self, reason: str) -> None:
        self.state, self.version = "invalid", None
        self._running.is_open = False
        self._running.lose_all(reason)

    async def shutdown(self) -> None:
        """Attempts still running get no further delta. Harmless when repeated."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._watching is not None:
            self._watching.cancel()
        if self._point is not None:
            self._point.close()
        self._running.is_open = False
        for attempt in self._running.in_sglang:
            if attempt.close is not None:
                attempt.close()
        if self._owns_server:
            await self._server.stop()
        else:
            self._server.unwatch()
        self._loading.drop()

    # Requests

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        self._check_open()
        attempt = self._running.add(request, emit)
        error = invalid_reason(request, self._model.vocabulary_size, self._settings)
        if self._health.failure:
            self._running.end(attempt, "abort", self._health.failure)
        elif error:
            self._running.end(attempt, "error", error)
        elif error := role_mismatch(request, self.role):
            self._running.end(attempt, "abort", error)
        elif request.params.max_new_tokens == 0:
            self._running.end(attempt, None if self.role == "prefill" else "length")
        elif self._stages is not None and self.role != "colocated":
            self._stages.begin(attempt, self.role)
        else:
            self._running.submit(attempt)

    async def abort(self, attempt: int) -> None:
        self._check_open()
        await self._running.abort(attempt)

    # Pauses

    async def pause(self, mode: PauseMode) -> None:
        self._check_open()
        self._is_paused = True
        self._running.is_open = False
        match mode:
            case "abort":
                await self._let_go()
                await self._running.abort_all()
            case "in_place":
                await self._hold()
            case "retract":
                await self._let_go()
                await self._running.retract_all()

    async def continue_generation(self) -> None:
        self._check_open()
        self._is_paused = False
        await self._go_on()

    async def flush_cache(self) -> None:
        self._check_open()
        if count := len(self._running.in_sglang):
            raise ValueError(f"KV of {count} requests is in use; pause with abort or retract first")
        self._num_flushes += 1
        self._running.cache_key = self._cache_key()
        if "kv_cache" not in self._released:
            await self._let_go()  # those aborted while it was held are still in it
            await self._api.flush(IDLE_LIMIT_S)

    async def _hold(self) -> None:
        """No iteration any more; what is in SGLang stays there with its KV."""
        if self._running.in_sglang and not self._running.is_held:
            await self._api.pause("in_place")
            self._running.is_held = True

    async def _let_go(self) -> None:
        """Let SGLang iterate so that aborted requests can leave: it ends a request only within an iteration."""
        if self._running.is_held:
            self._running.is_held = False
            await self._api.resume()

    async def _go_on(self) -> None:
        if self.state == "ready" and not self._is_paused and not self._released:
            await self._let_go()
            self._running.is_open = True
            self._running.go_on()

    # Weights

    async def begin_update(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        """Holds all iterations by itself, whether paused or not: a continue in between takes effect at the end."""
        self._check_open()
        if "weights" in self._released:
            raise ValueError("the memory of the weights is released; restore it first")
        self.state = "invalid"
        self._running.is_open = False
        if self._stages is not None:
            await self._stages.end_transfers()
        await self._hold()
        self._loading.stage(self._model, version, tensors)
        self.state = "updating"

    async def update_bucket(self, bucket: BucketSpec, data: memoryview) -> None:
        """``data`` may be reused when this returns."""
        if self._loading.staged is None or self.state != "updating":
            raise ValueError("no update has begun")
        await self._loading.add(bucket, data)

    async def end_update(self) -> str:
        staged = self._loading.staged
        if staged is None or self.state != "updating":
            raise ValueError("no update has begun")
        self.state = "invalid"
        staged.check_whole()
        await self._load()
        self.state, self.version = "ready", staged.version
        await self._go_on()
        return self._loading.checksum

    async def _load(self) -> None:
        version = await self._loading.load(self._api)
        if not self._running.is_held:  # else requests with their KV are in it
            await self._api.flush(IDLE_LIMIT_S)
        self._running.update(version)
        self._running.version = version
        self._running.cache_key = self._cache_key(version)

    async def checksum(self) -> str:
        """Without whole weights: SGLang's own digest of whatever it holds, equal to no published one."""
        self._check_open()
        if "weights" in self._released:
            raise ValueError("the memory of the weights is released; there is nothing to sum")
        return await self._loading.proof(self._api, self.version if self.state == "ready" else None)

    def _cache_key(self, version: Version | None = None) -> str:
        return f"{version or self.version}/{self._num_flushes}"

    # Memory

    async def release(self, tags: tuple[MemoryTag, ...]) -> Released | None:
        self._check_open()
        if not self._is_paused or self._running.live:
            raise ValueError(
                f"memory is released only while paused and idle: {len(self._running.live)} requests are there; "
                "pause with abort first"
            )
        new: list[MemoryTag] = [tag for tag in tags if tag not in self._released]
        if "weights" in new:
            self.state, self.version = "empty", None
            self._loading.drop()
        if not new:
            return Released(0, 0.0, 0.0)
        return await self._release(new)

    async def _release(self, tags: list[MemoryTag]) -> Released:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._let_go()
        if "kv_cache" not in self._released:
            await self._api.flush(IDLE_LIMIT_S)  # SGLang would not survive a release while busy
        before = self._held_bytes()
        self._released.update(tags)
        self._running.is_open = False
        try:
            await self._api.release(tags)
        except ServerError as error:
            raise ResidencyError(f"SGLang did not release {', '.join(tags)}: {error}") from error
        release_s = loop.time() - began
        freed = before - self._held_bytes()
        # A CPU host's pool holds only the pages that were used; a GPU's is all there.
        if self._settings.uses_gpu and freed <= 0:
            raise NotFreedError(f"SGLang released {', '.join(tags)}, and its GPUs hold no less than before")
        return Released(max(0, freed), release_s, loop.time() - began - release_s)

    def _held_bytes(self) -> int:
        assert self._server.pid is not None
        return held_bytes(self._server.pid, self._settings.uses_gpu)

    async def restore(self, tags: tuple[MemoryTag, ...]) -> None:
        self._check_open()
        wanted: list[MemoryTag] = [tag for tag in tags if tag in self._released]
        if not wanted:
            return
        try:
            await self._api.restore(wanted)
        except ServerError as error:
            raise ResidencyError(f"SGLang did not restore {', '.join(wanted)}: {error}") from error
        self._released.difference_update(wanted)
        await self._go_on()

    # Role

    async def set_role(self, role: Role) -> None:
        if role == self.role:
            return
        if self._point is None:
            raise UnsupportedError(f"the sglang engine cannot take the role {role}: it has no meeting point")
        if self._running.live or self._released or self.state == "updating":
            raise ValueError(
                f"a role is changed only while idle and with all memory: {len(self._running.live)} requests are "
                f"there, {len(self._released)} kinds of memory are released, weights are {self.state}"
            )
        self._running.is_open = False
        if "colocated" in (role, self.role) or not self._settings.transfer.startswith("mooncake"):
            await self._restart(role)
        else:
            await self._switch(role)
        self.role = role
        await self._go_on()

    async def _switch(self, role: Role) -> None:
        await self._api.flush(IDLE_LIMIT_S)
        try:
            await self._api.switch_role(role)
        except ServerError as error:
            # It may have stopped stage-way, from which SGLang knows no way back.
            log.warning("SGLang is started anew, it did not switch: %s", error)
            await self._restart(role)

    async def _restart(self, role: Role) -> None:
        """Restart SGLang alone, with the weights it had. A failure ends the engine: there is no server any more."""
        self._health.is_restarting = True
        try:
            await self._server.stop()
            await self._server.start(role, self._start_limit_s)
            self._running.is_held = False
            self._connect()
            if self.state == "ready" and self._loading.staged is not None:
                await self._load()
        except ValueError as error:
            self._health.fail(f"SGLang could not be started as {role}: {error}")
            raise
        finally:
            self._health.is_restarting = False

    # What others may know

    def is_idle(self) -> bool:
        return not self._running.live

    def load(self) -> EngineLoad:
        """Return the load that this engine has handed over; SGLang may let some of it wait."""
        num_in = len(self._running.in_sglang)
        return EngineLoad(
            num_running=min(num_in, self._settings.max_running),
            num_waiting=len(self._running.live) - min(num_in, self._settings.max_running),
            kv_used_tokens=min(self._running.num_tokens, self._settings.kv_capacity_tokens),
            kv_capacity_tokens=self._settings.kv_capacity_tokens,
        )

    def iteration_stats(self) -> list[IterationStat]:
        return self._meter.take()

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise ValueError("the engine was shut down")
