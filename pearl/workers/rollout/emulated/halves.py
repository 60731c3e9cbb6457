"""Attempts whose prefill and decode run on two emulated workers, as the core sees one half of them.

As with a real engine, a prefill half computes all KV of its context but the last token's and keeps it until it is
handed over; a decode half waits for the offer, takes room, and is an ordinary request once its KV has landed. The
words between the workers are the real ones; of the KV itself only a token of four bytes travels.
"""

import numpy as np

from pearl.state.weights import Version
from pearl.workers.rollout.emulated.request import Request
from pearl.workers.rollout.emulated.scheduler import Scheduler
from pearl.workers.rollout.kv_transfer.frames import KvLayout, Layer, Offer
from pearl.workers.rollout.kv_transfer.pages import (
    Begin,
    Block,
    Ended,
    Expect,
    Granted,
    Landed,
    Notice,
    Ready,
)

LAYOUT = KvLayout("float16", (Layer(0, 1, 1, 1),))


class Halves:
    """Notices to the transport, and what it is told in return."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.notices: list[Notice] = []
        """What happened since the caller last emptied it."""
        self._scheduler = scheduler

    def begun(self, request: Request, pair: str) -> None:
        if request.half == "prefill":
            self.notices.append(Begin(request.attempt, pair))
        elif request.half == "decode":
            self.notices.append(Expect(request.attempt, pair))

    def refused(self, attempt: int, pair: str, reason: str) -> None:
        """A prefill half that was not even queued: the other need not wait for it."""
        self.notices += [Begin(attempt, pair), Ended(attempt, reason)]

    def ended(self, request: Request, reason: str) -> None:
        if request.half is not None:
            self.notices.append(Ended(request.attempt, reason))

    def admitted(self, version: Version) -> None:
        """After a plan: those that got room in it."""
        for request in self._scheduler.take_granted():
            self.notices.append(Granted(request.attempt, request.computed))
            self._check_landed(request, version)

    def advanced(self, version: Version) -> None:
        """After a pass, or a plan without one: what prefill halves have got ready."""
        for request in self._scheduler.running:
            if request.half == "prefill" and request.kv_told < request.computed:
                request.kv_told = request.computed
                self.notices.append(Ready(request.attempt, request.computed, request.target, version, LAYOUT))

    def problem_with(self, request: Request, offer: Offer, version: Version | None) -> str:
        """Why the offer cannot be taken; "" = it can."""
        if offer.version != version:
            return f"KV of version {offer.version} was offered to version {version}"
        if offer.num_tokens != request.num_tokens - 1:
            return f"KV of {offer.num_tokens} tokens was offered for {request.num_tokens - 1}"
        return ""

    def offered(self, request: Request, offer: Offer) -> None:
        request.is_offered = True

    def land(self, request: Request, num_tokens: int, version: Version) -> None:
        """Its first ``num_tokens`` tokens are here."""
        request.computed = num_tokens
        self._check_landed(request, version)

    def _check_landed(self, request: Request, version: Version) -> None:
        if not request.is_prefilling:
            request.half = None
            request.kv_version = version
            self.notices.append(Landed(request.attempt))


def block_of(num_tokens: int) -> Block:
    return np.zeros(num_tokens * LAYOUT.bytes_per_token, np.uint8)
