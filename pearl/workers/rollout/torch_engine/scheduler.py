"""Which requests compute which tokens in the next iteration, and on which pages. Pure: no torch, no clock.

Every running request with one token to compute decodes in every iteration, so a long prompt never starves the others;
up to ``prefill_chunk_tokens`` more go to prompts, first come first served. When a decoding request finds no page,
cached prefixes are evicted, then the youngest request is retracted: it keeps its tokens, waits at its old place and
recomputes them. The oldest request alone always fits, hence there is always progress.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pearl.workers.rollout.torch_engine.pages import PagePool
from pearl.workers.rollout.torch_engine.prefix_cache import Match, PrefixCache
from pearl.workers.rollout.torch_engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Compute tokens ``[request.computed, request.computed + count)``."""

    request: Request
    count: int

    @property
    def is_last(self) -> bool:
        """The iteration reaches the last token to compute: its logits give the next one, or vouch for a stage's KV."""
        return self.request.computed + self.count == self.request.end

    @property
    def is_complete(self) -> bool:
        """Whether all of the request's context is computed, once the iteration is over and counted."""
        return self.request.computed == self.request.end


class Scheduler:
    def __init__(self, num_pages: int, page_tokens: int, prefill_chunk_tokens: int, max_running: int) -> None:
        self.page_tokens = page_tokens
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_tokens)
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival
        self.dirty_slots: list[npt.NDArray[np.int64]] = []
        """Places of KV given back that nothing vouches for; to be zeroed before the next iteration, since even a masked
        NaN would spoil whoever gets the page."""
        self.num_retractions = 0
        self._granted: list[Request] = []
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._max_running = max_running

    def can_ever_hold(self, num_tokens: int) -> bool:
        # The last token's KV is never needed.
        return self._pages_for(num_tokens - 1) <= self.pool.num_pages

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Forget a request wherever it is; what it computed stays cached while there is room."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._give_back(request)

    def retract(self, request: Request) -> None:
        """Back to waiting with its tokens, without its pages; what it computed stays cached while there is room."""
        self.running.remove(request)
        self._give_back(request)
        self.num_retractions += 1
        self.add(request)

    def plan(self) -> list[ScheduledChunk]:
        """The next iteration; empty when there is nothing to do. Decoding requests come first."""
        self._grow_decoding()
        decoding = [ScheduledChunk(r, 1) for r in self.running if _decodes(r)]
        budget = self._prefill_chunk_tokens
        prefilling: list[ScheduledChunk] = []
        for request in self._prefilling():
            count = min(budget, request.end - request.computed)
            if count == 0:  # a prefill stage whose whole context was cached
                continue
            prefilling.append(ScheduledChunk(request, count))
            budget -= count
            if budget == 0:
                break
        return decoding + prefilling

    def take_allocated(self) -> list[Request]:
        """Decode stages that were given pages since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def share(self, request: Request) -> None:
        """Offer a request's verified KV to others while it runs on."""
        if request.is_stale or not request.verified:
            return
        whole = self.cache.insert(request.ids[: request.verified], request.pages)
        for index, page in enumerate(whole):
            if page != request.pages[index]:
                self.pool.use(page)
                self.pool.drop(request.pages[index])
                request.replace_page(index, page)

    def forget_cache(self) -> None:
        """Drop all cached KV; running requests keep theirs, but nobody else may ever use it."""
        self.cache.clear()
        for request in self.running:
            request.is_stale = True

    def copied(self, request: Request) -> None:
        """The beginning of the request's last matching page is in place."""
        assert request.copy_from is not None
        self.pool.drop(request.copy_from)
        request.copy_from = None

    def _prefilling(self) -> Iterator[Request]:
        """Yield requests already running, then newly admitted ones, one by one while the caller has budget."""
        yield from [r for r in self.running if r.is_prefilling and r.stage != "decode"]
        if not self.waiting:
            return
        pending: set[bytes | None] = {r.pending_key for r in self.running} - {None}
        for request in list(self.waiting):
            if len(self.running) >= self._max_running:
                return
            if request.stage == "decode" and not request.is_offered:
                continue  # pages are taken only when its KV is sure to come
            match = self._match(request)
            key = self._pending_key(request, match)
            if key is not None and key in pending:
                continue  # another computes this prefix right now; next time it is in the cache
            if not self._admit(request, match):
                return
            request.pending_key = key
            pending.add(key)
            if request.stage == "decode":
                self._granted.append(request)
            else:
                yield request

    def _match(self, request: Request) -> Match:
        match = self.cache.match(request.ids[: request.num_tokens - 1])
        # KV that comes from elsewhere begins with a page, so that nothing has to be copied before it lands.
        return Match(match.pages, 0, 0) if request.stage == "decode" else match

    def _pending_key(self, request: Request, match: Match) -> bytes | None:
        """The prefix up to the end of the first page that is not cached; None when all is."""
        wanted = request.num_tokens - 1
        cached = len(match.pages) * self.page_tokens
        if cached + match.tail_tokens >= wanted:
            return None
        return request.ids[: min(wanted, cached + self.page_tokens)].tobytes()

    def _admit(self, request: Request, match: Match) -> bool:
        needed = self._pages_for(request.num_tokens) - len(match.pages)
        # Use what matched before evicting, or it could be evicted for itself.
        used = [*match.pages, match.tail] if match.tail else match.pages
        for page in used:
            self.pool.use(page)
        # One page in reserve for each running request keeps a newcomer from forcing retractions at once.
        reserve = len(self.running)
        if not self._make_room(needed + reserve) and not (reserve == 0 and self._make_room(needed)):
            for page in used:
                self.pool.drop(page)
            return False
        for page in match.pages:
            request.add_page(page)
        for _ in range(needed):
            request.add_page(self.pool.take())
        request.copy_from = match.tail or None  # stays in use until it is copied
        request.copy_tokens = match.tail_tokens
        request.computed = request.verified = len(match.pages) * self.page_tokens + match.tail_tokens
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_arrival)
        return True

    def _grow_decoding(self) -> None:
        for request in list(self.running):
            if request in self.running and _decodes(request):
                self._grow(request)

    def _grow(self, request: Request) -> None:
        while len(request.pages) < self._pages_for(request.num_tokens):
            if self._make_room(1):
                request.add_page(self.pool.take())
                continue
            # PairedRequests in transfer keep their pages: they are on their way, within limits of their own.
            youngest = next(r for r in reversed(self.running) if r.stage is None)
            self.retract(youngest)
            if youngest is request:
                return

    def _make_room(self, num_pages: int) -> bool:
        """Free at least so many pages by evicting cached ones; evicts nothing when that would not suffice."""
        missing = num_pages - self.pool.num_free
        if missing <= 0:
            return True
        if missing > self.pool.num_only_cached:
            return False
        return all(self.cache.evict() for _ in range(missing))

    def _give_back(self, request: Request) -> None:
        self.share(request)
        if request.computed > request.verified:
            self.dirty_slots.append(request.slots(request.verified, request.computed))
        if request.copy_from is not None:
            self.pool.drop(request.copy_from)
        for page in request.pages:
            self.pool.drop(page)
        request.pages.clear()
        request.table[:] = 0
        request.copy_from = request.pending_key = request.kv_version = None
        request.is_stale = False
        request.prompt_end = max(request.prompt_end, request.num_tokens - 1)
        request.computed = request.verified = 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


def _decodes(request: Request) -> bool:
    return request.stage is None and not request.is_prefilling


def _arrival(request: Request) -> int:
    return request.arrival
