"""The engine without its thread: requests in, iterations one by one, deltas out. Not thread-safe; no clock.

Iterations run only when ready, not paused and with memory for KV; requests wait meanwhile. Releasing the weights leads
to "empty".
"""

import logging
import time
from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from pearl.types.error_text import error_text
from pearl.types.messages.rollout import IterationStat
from pearl.types.trajectory import FinishReason, VersionRun
from pearl.types.weights import TensorSpec, Version
from pearl.workers.memory_offload.saver import Saver
from pearl.workers.model import vocabulary_rows
from pearl.workers.rollout.engine_core import BaseCore
from pearl.workers.rollout.kv_transfer.pages import Block
from pearl.workers.rollout.protocol import (
    Delta,
    EngineLoad,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    Released,
)
from pearl.workers.rollout.request_checks import invalid_reason, role_mismatch
from pearl.workers.rollout.torch_engine.memory import EngineMemory
from pearl.workers.rollout.torch_engine.paired_requests import PairedRequests
from pearl.workers.rollout.torch_engine.request import Request
from pearl.workers.rollout.torch_engine.runner import ModelRunner
from pearl.workers.rollout.torch_engine.sampler import Sampled
from pearl.workers.rollout.torch_engine.scheduler import ScheduledChunk, Scheduler
from pearl.workers.rollout.torch_engine.settings import EngineSettings
from pearl.workers.rollout.torch_engine.weights import IncomingWeights
from pearl.workers.weight_transfer.checksum import model_checksum

log = logging.getLogger(__name__)


class EngineCore(BaseCore[Request, IncomingWeights]):
    scheduler: Scheduler
    stages: PairedRequests

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings,
        count_tokens: Callable[[int], None] | None = None,
        saver: Saver | None = None,
    ) -> None:
        """``count_tokens`` is told how many tokens an iteration sampled, before anybody else hears of them; ``saver``
        takes device memory and gives it back."""
        rows = vocabulary_rows(model)
        self._vocabulary_size = min(rows, settings.vocabulary_size or rows)
        num_pages = settings.kv_capacity_tokens // settings.page_tokens
        scheduler = Scheduler(
            num_pages, settings.page_tokens, settings.prefill_chunk_tokens, settings.max_running
        )
        self._runner = ModelRunner(model, settings, self._vocabulary_size)
        stages = PairedRequests(scheduler, self._runner.store, settings.device, self._runner.num_layers)
        super().__init__(scheduler, stages)
        self._memory = EngineMemory(model, self._runner.store, settings.device, saver)
        self._count_tokens = count_tokens
        self._incoming_version: Version | None = None

    # Requests

    def _enqueue(self, request: GenerateRequest) -> None:
        if error := invalid_reason(request, self._vocabulary_size):
            self._answer(request, "error", error)
            return
        if error := role_mismatch(request, self.role):
            self._answer(request, "abort", error)
            return
        stage = None if self.role == "colocated" else self.role
        if request.params.max_new_tokens == 0:
            self._answer(request, None if stage == "prefill" else "length")
            return
        num_tokens = len(request.ids) + (1 if stage == "prefill" else request.params.max_new_tokens)
        if not self.scheduler.can_ever_hold(num_tokens):  # before room for them is made
            capacity = self.scheduler.pool.num_pages * self.scheduler.page_tokens
            text = f"{num_tokens} tokens of context and answer never fit into {capacity} tokens of KV"
            self._answer(request, "error", text)
            if stage == "prefill":
                self.stages.refused(request.attempt, request.pair, text)
            return
        entry = Request(request, self._num_arrivals, self.scheduler.page_tokens, stage)
        self._num_arrivals += 1
        self._requests[request.attempt] = entry
        self.scheduler.add(entry)
        self.stages.begun(entry, request.pair)

    # Iterations

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
        self.stages.admitted(self.version)
        self._clean_pages()
        self._copy_tails()
        if not works:
            assert any(r.stage for r in self._requests.values()), "requests wait, and none can be admitted"
            self.stages.advanced(self.version)
            return False
        num_decoding = sum(not work.request.is_prefilling for work in works)
        context = sum(work.request.num_tokens for work in works[:num_decoding])
        prefill_tokens = sum(work.count for work in works[num_decoding:])
        self._compute(works)
        self.stages.advanced(self.version)
        self.num_iterations += 1
        seconds = time.perf_counter() - started
        self._stats.append(IterationStat(seconds, num_decoding, prefill_tokens, context))
        return True

    def _compute(self, works: list[ScheduledChunk]) -> None:
        try:
            sampled = self._runner.run(works)
        # An iteration fails as a whole (out of memory, a model's own check): it ends the requests in it, nobody else.
        except Exception as error:
            log.exception("a pass over %d requests failed", len(works))
            self._advance(works)
            for work in works:
                self._end(work.request, "error", f"the iteration failed: {error_text(error)}")
            return
        self._advance(works)
        if sampled is not None:
            ending = [work.request for work in works if work.is_complete]
            self._accept(ending, sampled)

    def _advance(self, works: list[ScheduledChunk]) -> None:
        for work in works:
            request = work.request
            request.prefilled += max(0, min(request.prompt_end - request.computed, work.count))
            request.computed += work.count
            if request.kv_version is None:
                request.kv_version = self.version

    def _accept(self, ending: list[Request], sampled: Sampled) -> None:
        if self._count_tokens is not None:
            whole = [finite for r, finite in zip(ending, sampled.finite, strict=True) if r.stage is None]
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
            if request.stage is None:
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

    def _last_delta(self, request: Request, finish: FinishReason, error: str) -> Delta:
        return Delta(request.attempt, [], [], [], request.prefilled, finish, error)

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
            self.end_all("abort")
        elif mode == "retract":
            self._end_transfers("the worker gave up its KV")
            for request in list(self.scheduler.running):
                self.scheduler.retract(request)

    def begin_update(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        if not self._memory.has("weights"):
            raise ValueError("the memory for weights is released; restore it before an update")
        self.state, self._incoming = "invalid", None
        self._incoming = IncomingWeights(self._runner.model, tensors)
        self._incoming_version = version
        self.state = "updating"

    def end_update(self) -> str:
        self._take_incoming().load()
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

    # Stages of pairs, as the transport sees them

    def kv_arrived(self, attempt: int, version: Version, start: int, count: int, data: Block) -> None:
        if request := self._landing(attempt):
            assert (version, start) == (self.version, request.computed)
            self.stages.land(request, start, count, data, version)

    def kv_read(self, attempt: int, start: int, count: int) -> Block | None:
        request = self._requests.get(attempt)
        return None if request is None else self.stages.read(request, start, count)

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
        """Plain reads of counters: also right from another thread, as of some moment within the iteration."""
        scheduler = self.scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=scheduler.pool.num_used * scheduler.page_tokens,
            kv_capacity_tokens=scheduler.pool.num_pages * scheduler.page_tokens,
        )
