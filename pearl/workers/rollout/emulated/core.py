"""The emulated engine without a clock: requests in, iterations one by one with the seconds each takes, deltas out.

Iterations in which nothing changes but one more token for everybody are taken together, up to a given time; whatever
happens meanwhile first completes those that are over. What comes out is the same as one by one.

Iterations begin only when ready and not paused; requests wait meanwhile. Between ``begin`` and ``end`` requests may
come and be aborted, everything else waits for the end.
"""

from collections.abc import Callable

from pearl.types.messages.rollout import IterationStat
from pearl.types.trajectory import FinishReason
from pearl.types.weights import TensorSpec, Version
from pearl.workers.emulated_model import checksum_of
from pearl.workers.rollout.emulated.paired_requests import PairedRequests
from pearl.workers.rollout.emulated.request import Request
from pearl.workers.rollout.emulated.scheduler import Plan, Scheduler
from pearl.workers.rollout.emulated.settings import EmulatedSettings
from pearl.workers.rollout.emulated.timing import Timing
from pearl.workers.rollout.emulated.tokens import NOTHING, Ids, answer
from pearl.workers.rollout.emulated.weights import IncomingWeights
from pearl.workers.rollout.engine_core import BaseCore
from pearl.workers.rollout.paired_requests import PairStage
from pearl.workers.rollout.protocol import Delta, EngineLoad, GenerateRequest, MemoryTag, PauseMode
from pearl.workers.rollout.request_checks import invalid_reason, role_mismatch


class EmulatedCore(BaseCore[Request, IncomingWeights]):
    scheduler: Scheduler
    stages: PairedRequests

    def __init__(self, settings: EmulatedSettings, count_tokens: Callable[[int], None] | None = None) -> None:
        """``count_tokens`` is told how many tokens an iteration made, before anybody else hears of them."""
        scheduler = Scheduler(settings)
        super().__init__(scheduler, PairedRequests(scheduler))
        self._settings = settings
        self._count_tokens = count_tokens
        self._image = b""
        self._released: set[MemoryTag] = set()
        self._timing = Timing(settings)
        self._plan: Plan | None = None  # of the iterations under way
        self._seconds: list[float] = []  # that each of them takes

    # Requests

    def _enqueue(self, request: GenerateRequest) -> None:
        if error := invalid_reason(request, self._settings.vocabulary_size) or self._excess(request):
            self._answer(request, "error", error)
            if self.role == "prefill" and request.pair:
                self.stages.refused(request.attempt, request.pair, error)
            return
        if error := role_mismatch(request, self.role):
            self._answer(request, "abort", error)
            return
        stage = None if self.role == "colocated" else self.role
        if request.params.max_new_tokens == 0:
            self._answer(request, None if stage == "prefill" else "length")
            return
        self._queue(request, stage)

    def _queue(self, request: GenerateRequest, stage: PairStage | None) -> None:
        said: Ids = NOTHING
        finish: FinishReason = "length"
        if stage != "prefill":
            spread = self._settings.timing.length_spread
            said, finish = answer(request, self._settings.vocabulary_size, spread)
        self._requests[request.attempt] = entry = Request(request, self._num_arrivals, said, finish, stage)
        self._num_arrivals += 1
        self.scheduler.add(entry)
        self.stages.begun(entry, request.pair)

    def report(self) -> None:
        """Put all that was made and not told yet into ``deltas``."""
        for request in self.scheduler.running:
            if request.num_tokens > request.reported:
                self.deltas.append(request.delta(self.version))

    # Iterations

    def has_work(self) -> bool:
        return self.state == "ready" and not self.paused and bool(self._requests)

    def begin(self, horizon_s: float = 0.0) -> float | None:
        """Decide what the next iteration computes, and those like it within the horizon.

        Returns the seconds until all are over; None when there is nothing to compute until the KV of some stage has
        moved.
        """
        assert self.has_work()
        assert self._plan is None
        assert self.version is not None
        for request in self.scheduler.make_room():
            self._report(request)
            self.scheduler.retract(request)
        plan = self.scheduler.plan()
        self.stages.admitted(self.version)
        if not plan.decoding and not plan.prefill:
            assert any(r.stage for r in self._requests.values()), "requests wait, and none can be admitted"
            self.stages.advanced(self.version)
            return None
        self._plan = plan
        num_decoding, prefill_tokens = len(plan.decoding), plan.prefill_tokens
        limit = 1 if prefill_tokens else self._num_alike(plan)
        total = 0.0
        while len(self._seconds) < limit:
            iteration = self.num_iterations + len(self._seconds)
            seconds = self._timing.seconds(iteration, num_decoding, prefill_tokens)
            if self._seconds and total + seconds > horizon_s:
                break
            self._seconds.append(seconds)
            total += seconds
        return total

    def _num_alike(self, plan: Plan) -> int:
        """Iterations until a request ends or KV is full."""
        left = min(request.end - request.num_tokens for request in plan.decoding)
        return min(left, max(1, self.scheduler.num_free // len(plan.decoding)))

    def complete(self, elapsed_s: float) -> float:
        """Apply the iterations over by ``elapsed_s``, keep only the one now running, and return when it ends
        (seconds since ``begin``)."""
        end_s, num_over = self._seconds[0], 0
        while end_s <= elapsed_s and num_over < len(self._seconds) - 1:
            num_over += 1
            end_s += self._seconds[num_over]
        current = self._seconds[num_over]
        self._finish(num_over)
        self._seconds = [current]
        return end_s

    def end(self) -> bool:
        """Apply all remaining iterations; returns whether a request finished."""
        finished = self._finish(len(self._seconds))
        self._plan = None
        self._seconds = []
        for request in finished:
            self._end(request, request.answer_finish)
        assert self.version is not None
        self.stages.advanced(self.version)
        return bool(finished)

    def _finish(self, num_iterations: int) -> list[Request]:
        """Requests that are complete with the first ``num_iterations`` of those under way."""
        plan, version, there = self._plan, self.version, self._requests
        assert plan is not None
        assert version is not None
        if num_iterations == 0:
            return []
        # A request that ended meanwhile has no part in it any more.
        decoding = [request for request in plan.decoding if there.get(request.attempt) is request]
        self._note(plan, num_iterations)
        for request in decoding:
            request.decode(num_iterations, version)
        prefill = [work for work in plan.prefill if there.get(work.request.attempt) is work.request]
        sampled = decoding + [w.request for w in prefill if w.request.prefill(w.num_tokens, version)]
        num_tokens = len(decoding) * (num_iterations - 1) + len(sampled)
        if num_tokens and self._count_tokens is not None:
            self._count_tokens(num_tokens)
        self.scheduler.grew(num_tokens)
        return [request for request in sampled if request.num_tokens == request.end]

    def _note(self, plan: Plan, num_iterations: int) -> None:
        num_decoding = len(plan.decoding)
        context = sum(request.num_tokens for request in plan.decoding)
        for seconds in self._seconds[:num_iterations]:
            self._stats.append(IterationStat(seconds, num_decoding, plan.prefill_tokens, context))
            context += num_decoding
        self.num_iterations += num_iterations

    def _last_delta(self, request: Request, finish: FinishReason, error: str) -> Delta:
        return request.delta(self.version, finish, error)

    def _report(self, request: Request) -> None:
        if request.num_tokens > request.reported or request.prefilled:
            self.deltas.append(request.delta(self.version))

    # Pauses and weights, between two iterations

    def pause(self, mode: PauseMode) -> None:
        self.paused = True
        self.report()
        if mode == "abort":
            self.end_all("abort")
        elif mode == "retract":
            self._end_transfers("the worker gave up its KV")
            for request in list(self.scheduler.running):
                self._report(request)
                self.scheduler.retract(request)

    def hold(self) -> None:
        """No iteration begins until a whole good update."""
        self.state = "invalid"

    def begin_update(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        if "weights" in self._released:
            raise ValueError("no update fits in: the memory for weights is released; restore it first")
        self.report()  # under the version that made it
        self._end_transfers("the weights changed while its KV was on its way")
        self.state, self._incoming = "invalid", None
        self._incoming = IncomingWeights(version, tensors)
        self.state = "updating"

    def end_update(self) -> str:
        incoming = self._take_incoming()
        self._image = incoming.whole()
        # Nothing computed under the old weights may meet a request under the new ones.
        self.scheduler.forget_cache()
        self.version = incoming.version
        self.state = "empty" if self._released else "ready"
        return self.checksum()

    def checksum(self) -> str:
        return checksum_of(self._image)

    # Stages of pairs, as the transport sees them

    def kv_landed(self, attempt: int, num_tokens: int) -> None:
        if request := self._landing(attempt):
            assert self.version is not None
            self.stages.land(request, num_tokens, self.version)

    # Memory, while nothing runs

    def release(self, tags: tuple[MemoryTag, ...]) -> None:
        """Raises ValueError while it is not paused or requests are there."""
        if not self.paused or self._requests:
            raise ValueError(f"{len(self._requests)} requests are there; pause with abort before a release")
        if "kv_cache" in tags:
            self.flush()
        if "weights" in tags:
            self._image = b""
        if "weights" in tags or self.state == "ready":
            self.state = "empty"
        self._released |= set(tags)

    def restore(self, tags: tuple[MemoryTag, ...]) -> None:
        self._released -= set(tags)
        if not self._released and self._image and self.state == "empty":
            self.state = "ready"

    @property
    def released(self) -> frozenset[MemoryTag]:
        return frozenset(self._released)

    # What others may know

    def load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=scheduler.used,
            kv_capacity_tokens=scheduler.capacity,
        )

    def _excess(self, request: GenerateRequest) -> str:
        # The last token's KV is never needed, and a request that runs alone needs no reserve but its own.
        tokens = len(request.ids) + (1 if self.role == "prefill" else request.params.max_new_tokens)
        if tokens <= self.scheduler.capacity:
            return ""
        return f"{tokens} tokens of context and answer never fit into {self.scheduler.capacity} tokens of KV"
