"""The emulated engine behind the protocol: an ``EmulatedCore`` whose iterations take their time on a clock.

Iterations end at absolute deadlines, the sum of all before them, so that a late host catches up and nothing drifts. The
engine wakes when something is due to be told. It runs on the worker's loop, by timers; what must not happen during a
pass waits for its end.
"""

import asyncio
import logging
from collections.abc import Callable

from pearl.runtime.clock import Clock, Timer
from pearl.types.error_text import error_text
from pearl.types.messages.rollout import IterationStat
from pearl.types.weights import BucketSpec, TensorSpec, Version
from pearl.workers.rollout.attempts import LiveAttempts
from pearl.workers.rollout.emulated.core import EmulatedCore
from pearl.workers.rollout.emulated.kv_pages import EmulatedPages
from pearl.workers.rollout.emulated.paired_requests import block_of
from pearl.workers.rollout.emulated.settings import EmulatedSettings
from pearl.workers.rollout.engine_core import State
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Block
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

log = logging.getLogger(__name__)

LATE_S = 0.005
"""An iteration that ends later than this after its deadline counts as late; timers alone are good to a millisecond."""
MAX_BEHIND_S = 1.0
"""A host that was away for longer (stopped, asleep) does not get all of that time back at once."""
LOAD_SHARE = 0.25
"""Of ``update_seconds``, spent with the engine stopped; the rest is the transfer, while it goes on."""
NOMINAL_WEIGHT_BYTES = 16 << 30
"""What a release says it freed: a model of eight billion parameters in bfloat16."""


class DeadlineMiss:
    """How well the host kept up with the engine's own time."""

    def __init__(self) -> None:
        self.num_late = 0
        self.worst_s = 0.0
        self.given_up_s = 0.0

    def note(self, late_s: float) -> None:
        self.num_late += late_s > LATE_S
        self.worst_s = max(self.worst_s, late_s)


class EmulatedEngine:
    """See ``pearl.workers.rollout.protocol.Engine``."""

    name = "emulated"

    def __init__(
        self,
        settings: EmulatedSettings,
        clock: Clock,
        count_tokens: Callable[[int], None] | None = None,
        transport: KvTransport | None = None,
        role: Role = "colocated",
    ) -> None:
        """``transport`` hands KV over and is closed with the engine, without it the engine is colocated only;
        ``role`` is the first one."""
        if role != "colocated" and transport is None:
            raise UnsupportedError(f"the emulated engine takes the role {role} only with a KV transport")
        self.role = role
        self.deadline_miss = DeadlineMiss()
        self.busy_s = 0.0
        """Sum of all iterations' own time."""
        self.num_generated = 0
        self._settings = settings
        self._timing = settings.timing
        self._clock = clock
        self._outer_count = count_tokens
        self._transport = transport
        self._link_free_s = 0.0  # when all that is being sent will have left
        self._core = EmulatedCore(settings, self._count)
        self._core.role = role
        self._attempts = LiveAttempts()
        self._timer: Timer | None = None
        self._began_s = 0.0  # the iterations under way, by the engine's own time
        self._deadline_s = 0.0  # of their end
        self._told_s = 0.0  # when deltas last went out
        self._between = asyncio.Event()  # no pass is under way
        self._between.set()
        self._is_shut_down = False
        self._failure = ""  # of an iteration; nothing is served after it

    @property
    def state(self) -> State:
        return self._core.state

    @property
    def version(self) -> Version | None:
        return self._core.version

    @property
    def num_iterations(self) -> int:
        return self._core.num_iterations

    async def start(self) -> None:
        await self._clock.sleep(self._timing.start_seconds)
        if self._transport is not None:
            self._transport.start(EmulatedPages(self))

    # Requests

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        self._attempts.add(request.attempt, emit)
        if self._failure:
            self._attempts.deliver([Delta(request.attempt, [], [], [], 0, "error", self._failure)])
            return
        self._changed(lambda: self._core.submit(request))

    async def abort(self, attempt: int) -> None:
        self._changed(lambda: self._core.abort(attempt))

    # Iterations

    def _go_on(self) -> None:
        """Begin an iteration as soon as what is happening now has happened, unless one is under way."""
        if self._timer is None and self._core.has_work() and not self._is_shut_down:
            self._deadline_s = self._clock.now()
            self._timer = self._clock.call_later(0.0, lambda: self._guard(self._begin))

    def _guard(self, what: Callable[[], None]) -> None:
        """Run a timer's callback: an event loop would only log what it raises, and everybody would wait for ever."""
        try:
            what()
        except Exception as error:
            log.exception("the engine failed")
            self._failure = f"the emulated engine failed and serves no more: {error_text(error)}"
            self._core.state = "invalid"
            self._core.end_all("error", self._failure)
            self._between.set()
            self._deliver()

    def _begin(self) -> None:
        self._timer = None
        if not self._core.has_work() or self._is_shut_down:
            return
        now = self._clock.now()
        if self._deadline_s < now - MAX_BEHIND_S:
            self.deadline_miss.given_up_s += now - MAX_BEHIND_S - self._deadline_s
            self._deadline_s = now - MAX_BEHIND_S
        self._began_s = self._deadline_s
        # A host that is late makes up for it in fewer, longer strides.
        horizon_s = max(self._settings.flush_period_s, now - self._began_s)
        seconds = self._core.begin(horizon_s)
        if seconds is not None:
            self._between.clear()
            self._wait(seconds)
        self._deliver()

    def _wait(self, seconds: float) -> None:
        """Set the timer for the end of the iterations that have begun."""
        self._deadline_s = self._began_s + seconds
        delay_s = max(0.0, self._deadline_s - self._clock.now())
        self._timer = self._clock.call_later(delay_s, lambda: self._guard(self._end))

    def _complete(self) -> None:
        """Something happens: passes that are over count, and none is planned beyond the current one."""
        if not self._between.is_set() and self._timer is not None:
            self._timer.cancel()
            self._wait(self._core.complete(self._clock.now() - self._began_s))

    def _end(self) -> None:
        self._timer = None
        now = self._clock.now()
        self.deadline_miss.note(now - self._deadline_s)
        self.busy_s += self._deadline_s - self._began_s
        has_ended = self._core.end()
        if has_ended or now - self._told_s >= self._settings.flush_period_s:
            self._told_s = now
            self._core.report()
        self._deliver()
        self._between.set()
        if self._core.has_work():
            self._begin()

    def _count(self, num_tokens: int) -> None:
        self.num_generated += num_tokens
        if self._outer_count is not None:
            self._outer_count(num_tokens)

    def _deliver(self) -> None:
        notices, self._core.stages.notices = self._core.stages.notices, []
        if notices:
            assert self._transport is not None
            self._transport.post(notices)
        deltas, self._core.deltas = self._core.deltas, []
        self._attempts.deliver(deltas)

    # Pauses, weights, memory

    async def pause(self, mode: PauseMode) -> None:
        self._complete()
        self._core.paused = True  # no further pass begins
        await self._between.wait()
        self._core.pause(mode)
        self._deliver()

    async def continue_generation(self) -> None:
        self._core.resume()
        self._go_on()

    async def flush_cache(self) -> None:
        await self._between.wait()
        self._core.flush()

    async def begin_update(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        """Holds all iterations by itself, whether paused or not: a continue in between takes effect at the end."""
        self._complete()
        self._core.hold()
        await self._between.wait()
        self._core.begin_update(version, tensors)
        self._deliver()

    async def update_bucket(self, bucket: BucketSpec, data: memoryview) -> None:
        self._core.update_bucket(bucket, data)

    async def end_update(self) -> str:
        await self._clock.sleep(LOAD_SHARE * self._timing.update_seconds)
        checksum = self._core.end_update()
        self._go_on()
        return checksum

    async def checksum(self) -> str:
        self._check_open()
        return self._core.checksum()

    async def release(self, tags: tuple[MemoryTag, ...]) -> Released:
        """Takes ``release_seconds``, whatever the tags; the bytes are those that a real worker would hold."""
        await self._between.wait()
        num_bytes = sum(self._nominal_bytes(tag) for tag in tags if tag not in self._core.released)
        self._core.release(tags)
        await self._clock.sleep(self._timing.release_seconds)
        return Released(num_bytes, self._timing.release_seconds, 0.0)

    def _nominal_bytes(self, tag: MemoryTag) -> int:
        kv_bytes = int(self._settings.kv_capacity_tokens * self._timing.kv_bytes_per_token)
        return {"weights": NOMINAL_WEIGHT_BYTES, "kv_cache": kv_bytes, "cuda_graph": 0}[tag]

    async def restore(self, tags: tuple[MemoryTag, ...]) -> None:
        """Weights and KV take half of ``activation_seconds`` each."""
        share = sum(tag in ("weights", "kv_cache") for tag in tags) / 2
        await self._clock.sleep(share * self._timing.activation_seconds)
        self._core.restore(tags)
        self._go_on()

    # Roles, and the KV of stages as the transport asks for it

    async def set_role(self, role: Role) -> None:
        if role == self.role:
            return
        if self._transport is None:
            raise UnsupportedError(f"the emulated engine cannot take the role {role}: it has no KV transport")
        await self._between.wait()
        self._core.set_role(role)
        self.role = role

    async def kv_read(self, attempt: int, count: int) -> Block | None:
        """Return once that KV has crossed the link, which all that this worker sends shares."""
        seconds = count * self._timing.kv_bytes_per_token / self._timing.kv_bandwidth_bytes_per_s
        now = self._clock.now()
        self._link_free_s = max(now, self._link_free_s) + seconds
        await self._clock.sleep(self._link_free_s - now)
        return block_of(count) if self._core.has_stage(attempt) else None

    async def kv_sent(self, attempt: int) -> None:
        self._changed(lambda: self._core.kv_sent(attempt))

    async def kv_offered(self, attempt: int, offer: Offer) -> None:
        self._changed(lambda: self._core.kv_offered(attempt, offer))

    async def kv_landed(self, attempt: int, num_tokens: int) -> None:
        self._changed(lambda: self._core.kv_landed(attempt, num_tokens))

    async def kv_failed(self, attempt: int, reason: str) -> None:
        self._changed(lambda: self._core.kv_failed(attempt, reason))

    def _changed(self, change: Callable[[], None]) -> None:
        self._complete()
        change()
        self._deliver()
        self._go_on()

    def is_idle(self) -> bool:
        return not self._attempts

    def load(self) -> EngineLoad:
        return self._core.load()

    def iteration_stats(self) -> list[IterationStat]:
        return self._core.take_stats()

    def account(self) -> str:
        """One line of figures, for the log."""
        late = self.deadline_miss
        return (
            f"iterations={self.num_iterations} busy_s={self.busy_s:.3f} generated={self.num_generated} "
            f"late={late.num_late} worst_late_s={late.worst_s:.4f} given_up_s={late.given_up_s:.3f}"
        )

    async def shutdown(self) -> None:
        """Attempts still running get no further delta. Harmless when repeated."""
        self._is_shut_down = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._between.set()
        if self._transport is not None:
            await asyncio.to_thread(self._transport.close)

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise ValueError("the engine was shut down")
