"""Stages of pairs whose KV lies in pages. Pages are taken on the prefill side before they are on the decode side, so
that two full workers never wait for each other."""

import torch

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Block, Ready
from pearl.workers.rollout.paired_requests import BasePairedRequests
from pearl.workers.rollout.torch_engine.attention import KvStore
from pearl.workers.rollout.torch_engine.kv_blocks import layout_of, read_block, write_block
from pearl.workers.rollout.torch_engine.request import Request
from pearl.workers.rollout.torch_engine.scheduler import Scheduler


class PairedRequests(BasePairedRequests[Request]):
    def __init__(
        self, scheduler: Scheduler, store: KvStore, device: torch.device, num_layers: int | None
    ) -> None:
        """``num_layers`` of the model, to judge an offer before the first KV is here; None = not known."""
        super().__init__(scheduler)
        self._page_tokens = scheduler.page_tokens
        self._store = store
        self._device = device
        self._num_layers = num_layers

    def _ready(self, request: Request, version: Version) -> Ready:
        layout = layout_of(self._store)
        return Ready(request.attempt, request.computed, request.end, version, layout, self._page_tokens)

    def problem_with(self, request: Request, offer: Offer, version: Version | None) -> str:
        if problem := super().problem_with(request, offer, version):
            return problem
        mine, theirs = layout_of(self._store), offer.layout
        if mine.layers and theirs.layers and mine != theirs:
            return f"the workers' KV differs: here {mine}, there {theirs}"
        if theirs.layers and self._num_layers is not None and len(theirs.layers) != self._num_layers:
            return f"KV of {len(theirs.layers)} layers was offered to a model of {self._num_layers}"
        return ""

    def offered(self, request: Request, offer: Offer) -> None:
        super().offered(request, offer)
        request.layout = offer.layout

    def read(self, request: Request, start: int, count: int) -> Block:
        return read_block(self._store, request.slots(start, start + count))

    def land(self, request: Request, start: int, count: int, data: Block, version: Version) -> None:
        assert request.layout is not None
        slots = request.slots(start, start + count)
        write_block(self._store, slots, data, request.layout, self._device)
        request.computed = start + count
        self._check_landed(request, version)
        if request.stage is None:
            request.layout = None
