"""Stages of pairs in the torch and the emulated engine: what the KV transport is told of them, and tells in return.

A prefill stage computes the KV of its context but the last token, is read while it does, and keeps it until all is
handed over. A decode stage waits for an offer, is admitted like any request once there is room for it, and is an
ordinary request as soon as all its KV has landed.

KV belongs to one weight version: an offer of another one, or new weights before all has landed, end the stage.
"""

from abc import ABC, abstractmethod
from typing import Generic, Literal, Protocol, TypeVar

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Begin, Ended, Expect, Granted, Landed, Notice, Ready

PairStage = Literal["prefill", "decode"]


class StagedRequest(Protocol):
    attempt: int
    stage: PairStage | None
    is_offered: bool
    num_tokens: int
    computed: int
    kv_version: Version | None
    kv_told: int

    @property
    def is_prefilling(self) -> bool: ...


RequestT = TypeVar("RequestT", bound=StagedRequest)


class GrantingScheduler(Protocol[RequestT]):
    running: list[RequestT]

    def take_allocated(self) -> list[RequestT]: ...


class BasePairedRequests(ABC, Generic[RequestT]):
    def __init__(self, scheduler: GrantingScheduler[RequestT]) -> None:
        self.notices: list[Notice] = []
        """What happened since the caller last emptied it."""
        self._granting = scheduler

    def begun(self, request: RequestT, pair: str) -> None:
        match request.stage:
            case "prefill":
                self.notices.append(Begin(request.attempt, pair))
            case "decode":
                self.notices.append(Expect(request.attempt, pair))

    def refused(self, attempt: int, pair: str, reason: str) -> None:
        """A prefill stage that was not even queued: the other need not wait for it."""
        self.notices += [Begin(attempt, pair), Ended(attempt, reason)]

    def ended(self, request: RequestT, reason: str) -> None:
        if request.stage is not None:
            self.notices.append(Ended(request.attempt, reason))

    def admitted(self, version: Version) -> None:
        """Return notices, after a plan, of the requests that got memory in it."""
        for request in self._granting.take_allocated():
            self.notices.append(Granted(request.attempt, request.computed))
            self._check_landed(request, version)

    def advanced(self, version: Version) -> None:
        """Return notices of the KV that prefill stages have ready, after an iteration or a plan without one."""
        for request in self._granting.running:
            if request.stage == "prefill" and request.kv_told < request.computed:
                request.kv_told = request.computed
                self.notices.append(self._ready(request, version))

    @abstractmethod
    def _ready(self, request: RequestT, version: Version) -> Ready:
        """Return how many tokens of its KV may be read by now."""

    def problem_with(self, request: RequestT, offer: Offer, version: Version | None) -> str:
        """Why the offer cannot be taken; "" = it can."""
        wanted = request.num_tokens - 1
        if offer.version != version:
            return f"KV of version {offer.version} was offered to version {version}"
        if offer.num_tokens != wanted:
            return f"KV of {offer.num_tokens} tokens was offered for {wanted}"
        return ""

    def offered(self, request: RequestT, offer: Offer) -> None:
        request.is_offered = True

    def _check_landed(self, request: RequestT, version: Version) -> None:
        if not request.is_prefilling:
            request.stage = None
            request.kv_version = version
            self.notices.append(Landed(request.attempt))
