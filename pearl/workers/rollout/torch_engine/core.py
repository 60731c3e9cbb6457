"""The engine without its thread: requests in, passes one by one, deltas out. Not thread-safe, no clock but a stopwatch.

States: "empty" (built, no weights yet) -> "updating" -> "ready"; an update that is refused leads to "invalid", from
which only a whole good update leads back. Releasing the weights leads to "empty". Passes run only when ready, not
paused and with memory for KV; requests wait meanwhile.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np
from transformers import PreTrainedModel

from pearl.state.messages.rollout import IterationStat
from pearl.state.trajectory import FinishReason, VersionRun
from pearl.state.weights import BucketSpec, TensorSpec, Version
from pearl.workers.links.checksum import model_checksum
from pearl.workers.model import vocabulary_rows
from pearl.workers.residency.saver import Saver
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Block
from pearl.workers.rollout.protocol import (
    Delta,
    EngineLoad,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    Released,
    Role,
)
from pearl.workers.rollout.torch_engine.halves import Halves, misfit
from pearl.workers.rollout.torch_engine.memory import EngineMemory
from pearl.workers.rollout.torch_engine.request import Request
from pearl.workers.rollout.torch_engine.runner import ModelRunner
from pearl.workers.rollout.torch_engine.sampler import Sampled
from pearl.workers.rollout.torch_engine.scheduler import Scheduler, Work
from pearl.workers.rollout.torch_engine.settings import EngineSettings
from pearl.workers.rollout.torch_engine.weights import IncomingWeights

log = logging.getLogger(__name__)

State = Literal["empty", "updating", "invalid", "ready"]
MAX_STATS = 4096
"""Passes remembered between two calls of ``take_stats``."""


class EngineCore:
    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings,
        count_tokens: Callable[[int], None] | None = None,
        saver: Saver | None = None,
    ) -> None:
        """``count_tokens`` is told how many tokens a pass sampled, before anybody else hears of them; ``saver``
        takes device memory and gives it back."""
        self.state: State = "empty"
        self.version: Version | None = None
        self.paused = False
        self.role: Role = "colocated"
        self.deltas: list[Delta] = []
        """What happened since the caller last emptied it; at most one entry a request and pass."""
        self.num_passes = 0
        self._vocabulary_size = vocabulary_rows(model)
        num_pages = settings.kv_capacity_tokens // settings.page_tokens
        self.scheduler = Scheduler(
            num_pages, settings.page_tokens, settings.prefill_chunk_tokens, settings.max_running
        )
        self._runner = ModelRunner(model, settings.device, num_pages, settings.page_tokens)
        num_layers: int | None = getattr(model.config, "num_hidden_layers", None)
        self.halves = Halves(self.scheduler, self._runner.store, settings.device, num_layers)
        self._memory = EngineMemory(model, self._runner.store, settings.device, saver)
        self._requests: dict[int, Request] = {}
        self._stats: deque[IterationStat] = deque(maxlen=MAX_STATS)
        self._num_arrivals = 0
        self._count_tokens = count_tokens
        self._incoming: IncomingWeights | None = None
        self._incoming_version: Version | None = None

    # Requests

    def submit(self, request: GenerateRequest) -> None:
        """Queue it; what is wrong with it comes out as its only delta, with ``finish="error"``."""
        if refusal := self._refusal(request):
            self._answer(request, "error", refusal)
            return
        if refusal := misfit(request, self.role):
            self._answer(request, "abort", refusal)
            return
        half = None if self.role == "colocated" else self.role
        if request.params.max_new_tokens == 0:
            self._answer(request, None if half == "prefill" else "length")
            return
        entry = Request(request, self._num_arrivals, self.scheduler.page_tokens, half)
        if not self.scheduler.can_ever_fit(entry):
            capacity = self.scheduler.pool.num_pages * self.scheduler.page_tokens
            text = f"{entry.limit} tokens of context and answer never fit into {capacity} tokens of KV"
            self._answer(request, "error", text)
            if half is not None:
                self.halves.refused(entry, request.pair, text)
            return
        self._num_arrivals += 1
        self._requests[request.attempt] = entry
        self.scheduler.add(entry)
        self.halves.begun(entry, request.pair)

    def _answer(self, request: GenerateRequest, finish: FinishReason | None, error: str = "") -> None:
        """The only delta of a request that is not queued."""
        self.deltas.append(Delta(request.attempt, [], [], [], 0, finish, error, finish is None))

    def abort(self, attempt: int) -> None:
        request = self._requests.get(attempt)
        if request is not None:
            self._end(request, "abort")

    def fail_all(self, error: str) -> None:
        for request in list(self._requests.values()):
            self._end(request, "error", error)

    # Passes

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def has_work(self) -> bool:
        is_able = self.state == "ready" and not self.paused and self._memory.has("kv_cache")
        return is_able and bool(self._requests)

    def step(self) -> bool:
        """One pass over all that is scheduled; False when nothing may or can run."""
        if not self.has_work():
            return False
        started = time.perf_counter()
        assert self.version is not None
        works = self.scheduler.plan()
        self.halves.admitted(self.version)
        self._clean_pages()
        self._copy_tails()
        if not works:
            assert any(r.half for r in self._requests.values()), "requests wait, and none can be admitted"
            self.halves.advanced(self.version)
            return False
        num_decoding = sum(not work.request.is_prefilling for work in works)
        context = sum(work.request.num_tokens for work in works[:num_decoding])
        prefill_tokens = sum(work.count for work in works[num_decoding:])
        self._compute(works)
        self.halves.advanced(self.version)
        self.num_passes += 1
        seconds = time.perf_counter() - started
        self._stats.append(IterationStat(seconds, num_decoding, prefill_tokens, context))
        return True

    def _compute(self, works: list[Work]) -> None:
        try:
            sampled = self._runner.run(works)
        # A pass fails as a whole (out of memory, a model's own check): it ends the requests in it, nobody else.
        except Exception as error:
            log.exception("a pass over %d requests failed", len(works))
            self._advance(works)
            for work in works:
                self._end(work.request, "error", f"the pass failed: {error}")
            return
        self._advance(works)
        if sampled is not None:
            ending = [work.request for work in works if work.is_complete]
            self._accept(ending, sampled)

    def _advance(self, works: list[Work]) -> None:
        for work in works:
            request = work.request
            request.prefilled += max(0, min(request.prompt_end - request.computed, work.count))
            request.computed += work.count
            if request.kv_version is None:
                request.kv_version = self.version

    def _accept(self, ending: list[Request], sampled: Sampled) -> None:
        if self._count_tokens is not None:
            whole = [finite for r, finite in zip(ending, sampled.finite, strict=True) if r.half is None]
            self._count_tokens(sum(whole))
        for row, request in enumerate(ending):
            if not sampled.finite[row]:
                self._end(request, "error", "the model's logits are not finite")
                continue
            first = request.pending_key is not None
            request.verified = request.computed
            if first:
                request.pending_key = None
                self.scheduler.share(request)
            if request.half is None:
                self._append(request, sampled.ids[row], sampled.logprobs[row])

    def _append(self, request: Request, token: int, logprob: float) -> None:
        assert self.version is not None
        assert request.kv_version is not None
        request.ids[request.num_tokens] = token
        request.num_tokens += 1
        finish: FinishReason | None = None
        if token in request.stop_ids:
            finish = "stop"
        elif request.num_tokens == request.limit:
            finish = "length"
        run = VersionRun(self.version, 1, request.kv_version)
        self.deltas.append(Delta(request.attempt, [token], [logprob], [run], request.prefilled, finish))
        request.prefilled = 0
        if finish is not None:
            self._forget(request)

    def _end(self, request: Request, finish: FinishReason, error: str = "") -> None:
        self.deltas.append(Delta(request.attempt, [], [], [], request.prefilled, finish, error))
        self.halves.ended(request, error or finish)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.attempt]
        self.scheduler.remove(request)

    def _copy_tails(self) -> None:
        sources, targets = [], []
        for request in [r for r in self.scheduler.running if r.copy_from is not None]:
            assert request.copy_from is not None
            first = request.copy_from * request.page_tokens
            sources.append(np.arange(first, first + request.copy_tokens))
            targets.append(request.slots(request.computed - request.copy_tokens, request.computed))
            self.scheduler.copied(request)
        if sources:
            self._runner.copy(np.concatenate(sources), np.concatenate(targets))

    def _clean_pages(self) -> None:
        if self.scheduler.dirty_slots:
            self._runner.zero(np.concatenate(self.scheduler.dirty_slots))
            self.scheduler.dirty_slots.clear()

    # Pauses and weights

    def pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            for request in list(self._requests.values()):
                self._end(request, "abort")
        elif mode == "retract":
            self._end_transfers("the worker gave up its KV")
            for request in list(self.scheduler.running):
                self.scheduler.retract(request)

    def resume(self) -> None:
        """While an update is on, it takes effect at the update's end."""
        self.paused = False

    def flush(self) -> None:
        if self.scheduler.running:
            raise ValueError(
                f"{len(self.scheduler.running)} requests still use the KV cache; pause with abort or retract first"
            )
        self.scheduler.forget_cache()

    def begin_update(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        if not self._memory.has("weights"):
            raise ValueError("the memory for weights is released; restore it before an update")
        self.state, self._incoming = "invalid", None
        self._incoming = IncomingWeights(self._runner.model, tensors)
        self._incoming_version = version
        self.state = "updating"

    def update_bucket(self, bucket: BucketSpec, data: memoryview) -> None:
        if self._incoming is None:
            raise ValueError(f"bucket at {bucket.offset}: no update was begun, or it was refused")
        try:
            self._incoming.add(bucket, data)
        except ValueError:
            self.state, self._incoming = "invalid", None
            raise

    def end_update(self) -> str:
        incoming, self._incoming = self._incoming, None
        self.state = "invalid"
        if incoming is None:
            raise ValueError("no update was begun, or it was refused")
        incoming.load()
        self._end_transfers("the weights changed while its KV was on its way")
        # Nothing computed under the old weights may meet a request under the new ones.
        self.scheduler.forget_cache()
        self.version = self._incoming_version
        checksum = self.checksum()
        self.state = "ready"
        return checksum

    def checksum(self) -> str:
        if not self._memory.has("weights"):
            raise ValueError("the weights are released; there is nothing to prove")
        return model_checksum(self._runner.model)

    # Halves of pairs, as the transport sees them

    def set_role(self, role: Role) -> None:
        if self._requests:
            raise ValueError(f"{len(self._requests)} requests are there; a role is changed only while idle")
        self.flush()
        self.role = role

    def kv_offered(self, attempt: int, offer: Offer) -> None:
        request = self._requests.get(attempt)
        if request is None or request.half != "decode" or request.is_offered:
            return
        if problem := self.halves.problem_with(request, offer, self.version):
            self._end(request, "abort", problem)
        else:
            self.halves.offered(request, offer)

    def kv_arrived(self, attempt: int, version: Version, start: int, count: int, data: Block) -> None:
        request = self._requests.get(attempt)
        if request is None or request.half != "decode" or request not in self.scheduler.running:
            return  # its pages may be another's by now
        assert (version, start) == (self.version, request.computed)
        self.halves.land(request, start, count, data, version)

    def kv_read(self, attempt: int, start: int, count: int) -> Block | None:
        request = self._requests.get(attempt)
        return None if request is None else self.halves.read(request, start, count)

    def kv_sent(self, attempt: int) -> None:
        request = self._requests.get(attempt)
        if request is not None:
            self.deltas.append(Delta(attempt, [], [], [], request.prefilled, handed_over=True))
            self._forget(request)

    def kv_failed(self, attempt: int, reason: str) -> None:
        request = self._requests.get(attempt)
        if request is not None and request.half is not None:
            self._end(request, "abort", reason)

    def _end_transfers(self, reason: str) -> None:
        """Those whose KV, of the version until now, was partly on its way; those that still wait for it go on."""
        for request in list(self._requests.values()):
            is_waiting = request in self.scheduler.waiting and not request.is_offered
            if request.half is not None and not is_waiting:
                self._end(request, "abort", reason)

    # Device memory

    def release(self, tags: tuple[MemoryTag, ...]) -> Released:
        if not self.paused or self._requests:
            raise ValueError(
                f"memory is released only while paused and idle: {len(self._requests)} requests are there; "
                "pause with abort first"
            )
        if "weights" in tags:
            self.state, self.version, self._incoming = "empty", None, None
        if "kv_cache" in tags:
            self.scheduler.forget_cache()
            self.scheduler.dirty_slots.clear()  # it comes back as zeros
        return self._memory.release(tags)

    def restore(self, tags: tuple[MemoryTag, ...]) -> None:
        self._memory.restore(tags)

    # What others may know

    def load(self) -> EngineLoad:
        """Plain reads of counters: also right from another thread, as of some moment within the pass."""
        scheduler = self.scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=scheduler.pool.num_used * scheduler.page_tokens,
            kv_capacity_tokens=scheduler.pool.num_pages * scheduler.page_tokens,
        )

    def take_stats(self) -> list[IterationStat]:
        """Also from another thread."""
        stats = []
        while self._stats:
            stats.append(self._stats.popleft())
        return stats

    def _refusal(self, request: GenerateRequest) -> str:
        """Why it cannot be served at all; one bad id would otherwise end a pass shared with others."""
        params = request.params
        if len(request.ids) == 0:
            return "the context is empty; give at least one token id"
        lowest, highest = int(request.ids.min()), int(request.ids.max())
        if lowest < 0 or highest >= self._vocabulary_size:
            bad = lowest if lowest < 0 else highest
            return f"token id {bad} is not in the model's vocabulary of {self._vocabulary_size}"
        if params.max_new_tokens < 0:
            return f"max_new_tokens = {params.max_new_tokens}; it must not be negative"
        if not 0.0 <= params.temperature < float("inf"):
            return f"temperature = {params.temperature}; it must be finite and not negative"
        return ""
