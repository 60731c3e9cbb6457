"""What the cores of the torch and the emulated engine have in common: which requests are there, how they end, and
stages of pairs as the KV transport sees them.

States: "empty" (no memory for weights or KV, or nothing in it yet) -> "updating" -> "ready"; an update that is refused
leads to "invalid", from which only a whole good update leads back.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, Literal, Protocol, TypeVar

from pearl.types.error_text import error_text
from pearl.types.messages.rollout import IterationStat
from pearl.types.trajectory import FinishReason
from pearl.types.weights import BucketSpec, Version
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.paired_requests import BasePairedRequests, StagedRequest
from pearl.workers.rollout.protocol import Delta, GenerateRequest, Role

log = logging.getLogger(__name__)

State = Literal["empty", "updating", "invalid", "ready"]
MAX_STATS = 4096
"""Iterations remembered between two calls of ``take_stats``."""


class CoreRequest(StagedRequest, Protocol):
    prefilled: int


RequestT = TypeVar("RequestT", bound=CoreRequest)


class CoreScheduler(Protocol[RequestT]):
    waiting: list[RequestT]
    running: list[RequestT]

    def remove(self, request: RequestT) -> None: ...

    def forget_cache(self) -> None: ...


class Incoming(Protocol):
    """An update on its way."""

    def add(self, bucket: BucketSpec, data: memoryview) -> None: ...


IncomingT = TypeVar("IncomingT", bound=Incoming)


class BaseCore(ABC, Generic[RequestT, IncomingT]):
    scheduler: CoreScheduler[RequestT]
    stages: BasePairedRequests[RequestT]

    def __init__(self, scheduler: CoreScheduler[RequestT], stages: BasePairedRequests[RequestT]) -> None:
        self.state: State = "empty"
        self.version: Version | None = None
        self.paused = False
        self.role: Role = "colocated"
        self.deltas: list[Delta] = []
        """What there is to tell since the caller last emptied it."""
        self.num_iterations = 0
        self.scheduler = scheduler
        self.stages = stages
        self._requests: dict[int, RequestT] = {}
        self._num_arrivals = 0
        self._stats: deque[IterationStat] = deque(maxlen=MAX_STATS)
        self._incoming: IncomingT | None = None

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def take_stats(self) -> list[IterationStat]:
        """Return the iterations since the last call; may be called from another thread."""
        stats = []
        while self._stats:
            stats.append(self._stats.popleft())
        return stats

    def submit(self, request: GenerateRequest) -> None:
        """Queue it; what is wrong with it, foreseen or not, comes out as its only delta, with ``finish="error"``."""
        try:
            self._enqueue(request)
        # Whatever a request makes this code raise is that request's end, and nobody else's.
        except Exception as error:
            log.exception("attempt %d could not be queued", request.attempt)
            entry = self._requests.pop(request.attempt, None)
            if entry is not None:
                with contextlib.suppress(Exception):  # it may have failed before it was there
                    self.scheduler.remove(entry)
            text = f"it cannot be queued: {type(error).__name__}: {error_text(error)}"
            self._answer(request, "error", text)
            if self.role == "prefill" and request.pair:
                self.stages.refused(request.attempt, request.pair, text)

    @abstractmethod
    def _enqueue(self, request: GenerateRequest) -> None:
        """Queue it or answer it."""

    # How requests end

    def abort(self, attempt: int) -> None:
        request = self._requests.get(attempt)
        if request is not None:
            self._end(request, "abort")

    def end_all(self, finish: FinishReason, error: str = "") -> None:
        for request in list(self._requests.values()):
            self._end(request, finish, error)

    def _answer(self, request: GenerateRequest, finish: FinishReason | None, error: str = "") -> None:
        """The only delta of a request that is not queued."""
        self.deltas.append(Delta(request.attempt, [], [], [], 0, finish, error, finish is None))

    @abstractmethod
    def _last_delta(self, request: RequestT, finish: FinishReason, error: str) -> Delta:
        """Build the request's last delta, with all tokens that were not reported yet."""

    def _end(self, request: RequestT, finish: FinishReason, error: str = "") -> None:
        self.deltas.append(self._last_delta(request, finish, error))
        self.stages.ended(request, error or finish)
        self._forget(request)

    def _forget(self, request: RequestT) -> None:
        del self._requests[request.attempt]
        self.scheduler.remove(request)

    # Pauses and weights

    def resume(self) -> None:
        """Resume iterations; during an update it takes effect at the update's end."""
        self.paused = False

    def flush(self) -> None:
        if self.scheduler.running:
            raise ValueError(
                f"{len(self.scheduler.running)} requests still use the KV cache; pause with abort or retract first"
            )
        self.scheduler.forget_cache()

    def update_bucket(self, bucket: BucketSpec, data: memoryview) -> None:
        if self._incoming is None:
            raise ValueError(f"bucket at {bucket.offset}: no update was begun, or it was refused")
        try:
            self._incoming.add(bucket, data)
        except ValueError:
            self.state, self._incoming = "invalid", None
            raise

    def _take_incoming(self) -> IncomingT:
        """Take the update's weights at its end; until they are loaded there is nothing to serve."""
        incoming, self._incoming = self._incoming, None
        self.state = "invalid"
        if incoming is None:
            raise ValueError("no update was begun, or it was refused")
        return incoming

    # Stages of pairs, as the transport sees them

    def set_role(self, role: Role) -> None:
        """Raises ValueError while requests are there."""
        if self._requests:
            raise ValueError(f"{len(self._requests)} requests are there; a role is changed only while idle")
        self.flush()
        self.role = role

    def kv_offered(self, attempt: int, offer: Offer) -> None:
        request = self._requests.get(attempt)
        if request is None or request.stage != "decode" or request.is_offered:
            return
        if problem := self.stages.problem_with(request, offer, self.version):
            self._end(request, "abort", problem)
        else:
            self.stages.offered(request, offer)

    def has_stage(self, attempt: int) -> bool:
        request = self._requests.get(attempt)
        return request is not None and request.stage is not None

    def _landing(self, attempt: int) -> RequestT | None:
        """The decode stage whose KV comes in; None when it has lost its room, which may be another's by now."""
        request = self._requests.get(attempt)
        if request is None or request.stage != "decode" or request not in self.scheduler.running:
            return None
        return request

    def kv_sent(self, attempt: int) -> None:
        request = self._requests.get(attempt)
        if request is not None:
            self.deltas.append(Delta(attempt, [], [], [], request.prefilled, handed_over=True))
            self._forget(request)

    def kv_failed(self, attempt: int, reason: str) -> None:
        if self.has_stage(attempt):
            self._end(self._requests[attempt], "abort", reason)

    def _end_transfers(self, reason: str) -> None:
        """End the requests whose KV, of the version until now, was partly transferred; those that still wait for
        it stay."""
        for request in list(self._requests.values()):
            is_waiting = request in self.scheduler.waiting and not request.is_offered
            if request.stage is not None and not is_waiting:
                self._end(request, "abort", reason)
