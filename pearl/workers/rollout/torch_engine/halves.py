"""Attempts whose prefill and decode run on two workers, as the engine core sees one half of them.

A prefill half computes the KV of its context but the last token, is read while it does, and keeps its pages until
all is handed over. A decode half waits for an offer, is admitted like any request once there are pages for it, and
is an ordinary request as soon as all its KV has landed. Pages are taken on the prefill side before they are on the
decode side, so that two full workers never wait for each other.

KV belongs to one weight version: an offer of another one, or new weights before all has landed, end the half.
"""

import torch

from pearl.state.weights import Version
from pearl.workers.rollout.kv_transfer.frames import Offer
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
from pearl.workers.rollout.torch_engine.attention import KvStore
from pearl.workers.rollout.torch_engine.kv_blocks import layout_of, read_block, write_block
from pearl.workers.rollout.torch_engine.request import Request
from pearl.workers.rollout.torch_engine.scheduler import Scheduler


class Halves:
    """Notices to the transport, and what it is told in return."""

    def __init__(
        self, scheduler: Scheduler, store: KvStore, device: torch.device, num_layers: int | None
    ) -> None:
        """``num_layers`` of the model, to judge an offer before the first KV is here; None = not known."""
        self.notices: list[Notice] = []
        """What happened since the caller last emptied it."""
        self._scheduler = scheduler
        self._store = store
        self._device = device
        self._num_layers = num_layers

    def begun(self, request: Request, pair: str) -> None:
        match request.half:
            case "prefill":
                self.notices.append(Begin(request.attempt, pair))
            case "decode":
                self.notices.append(Expect(request.attempt, pair))

    def refused(self, request: Request, pair: str, reason: str) -> None:
        """Tell the other half at once, rather than let it wait."""
        if request.half == "prefill":
            self.notices += [Begin(request.attempt, pair), Ended(request.attempt, reason)]

    def ended(self, request: Request, reason: str) -> None:
        if request.half is not None:
            self.notices.append(Ended(request.attempt, reason))

    def admitted(self, version: Version) -> None:
        """After a plan: those that it gave pages to."""
        for request in self._scheduler.take_granted():
            self.notices.append(Granted(request.attempt, request.computed))
            self._check_landed(request, version)

    def advanced(self, version: Version) -> None:
        """After a pass, or a plan without one: what prefill halves have got ready."""
        for request in self._scheduler.running:
            if request.half == "prefill" and request.told < request.computed:
                request.told = request.computed
                total = request.num_tokens - 1
                layout = layout_of(self._store)
                page = self._scheduler.page_tokens
                self.notices.append(Ready(request.attempt, request.computed, total, version, layout, page))

    def problem_with(self, request: Request, offer: Offer, version: Version | None) -> str:
        """Why the offer cannot be taken; "" = it can."""
        if offer.version != version:
            return f"KV of version {offer.version} was offered to version {version}"
        wanted = request.num_tokens - 1
        if offer.num_tokens != wanted:
            return f"KV of {offer.num_tokens} tokens was offered for {wanted}"
        mine, theirs = layout_of(self._store), offer.layout
        if mine.layers and theirs.layers and mine != theirs:
            return f"the workers' KV differs: here {mine}, there {theirs}"
        if theirs.layers and self._num_layers is not None and len(theirs.layers) != self._num_layers:
            return f"KV of {len(theirs.layers)} layers was offered to a model of {self._num_layers}"
        return ""

    def offered(self, request: Request, offer: Offer) -> None:
        request.is_offered = True
        request.layout = offer.layout

    def read(self, request: Request, start: int, count: int) -> Block:
        return read_block(self._store, request.slots(start, start + count))

    def land(self, request: Request, start: int, count: int, data: Block, version: Version) -> None:
        assert request.layout is not None
        slots = request.slots(start, start + count)
        write_block(self._store, slots, data, request.layout, self._device)
        request.computed = start + count
        self._check_landed(request, version)

    def _check_landed(self, request: Request, version: Version) -> None:
        if not request.is_prefilling:
            request.half = request.layout = None
            request.kv_version = version
            self.notices.append(Landed(request.attempt))
