"""Which requests compute how much in the next iteration, and whose KV has room. Pure.

Every running request with one token to compute decodes in every iteration; up to ``prefill_chunk_tokens`` more go to
contexts, first come first served; a sibling waits while another computes what both begin with, and then is spared it.
When decoding needs room, kept prefixes go first, then the youngest request is retracted: it keeps its tokens, waits at
its old place and computes them again.
"""

import bisect
from typing import NamedTuple

from pearl.workers.rollout.emulated.cache import PrefixCache, common
from pearl.workers.rollout.emulated.request import Request
from pearl.workers.rollout.emulated.settings import EmulatedSettings


class ScheduledChunk(NamedTuple):
    """Compute so many tokens of the request."""

    request: Request
    num_tokens: int


class Plan(NamedTuple):
    decoding: list[Request]
    prefill: list[ScheduledChunk]

    @property
    def prefill_tokens(self) -> int:
        return sum(work.num_tokens for work in self.prefill)


class Scheduler:
    def __init__(self, settings: EmulatedSettings) -> None:
        self.capacity = settings.kv_capacity_tokens
        self.cache = PrefixCache()
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival
        self.held = 0
        """Tokens of KV that running requests have or are going to compute next."""
        self.num_retractions = 0
        self._granted: list[Request] = []
        self._chunk = settings.prefill_chunk_tokens
        self._max_running = settings.max_running

    @property
    def used(self) -> int:
        return self.held + self.cache.num_tokens

    @property
    def num_free(self) -> int:
        """Tokens that running requests may still grow by, at the cost of what is kept."""
        return self.capacity - self.held

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Forget it wherever it is; what it computed is kept for its trajectory while there is room."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.held -= request.num_tokens
        if request.computed and not request.is_stale:
            self.cache.put(request.key, request.ids[: request.computed])
        self.cache.shrink(self.capacity - self.held)

    def retract(self, request: Request) -> None:
        self.remove(request)
        request.lose_kv()
        self.num_retractions += 1
        self.add(request)

    def forget_cache(self) -> None:
        """Drop all kept KV; running requests go on with theirs, but nobody else may ever use it."""
        self.cache.clear()
        for request in self.running:
            request.is_stale = True

    def grew(self, num_tokens: int) -> None:
        """RequestManager requests have so many more tokens."""
        self.held += num_tokens
        self.cache.shrink(self.capacity - self.held)

    def make_room(self) -> list[Request]:
        """Free memory so that every decoding request can grow by a token; returns the requests to be retracted for
        it."""
        losers = []
        free = self.num_free
        # PairedRequests in transfer neither grow nor go: they are on their way, within limits of their own.
        growing = [request for request in self.running if request.stage is None]
        num_growing = len(growing)
        for request in reversed(growing):
            if free >= num_growing:
                break
            losers.append(request)
            free += request.num_tokens
            num_growing -= 1
        self.cache.shrink(free - num_growing)
        return losers

    def take_allocated(self) -> list[Request]:
        """Decode stages that got room since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def plan(self) -> Plan:
        """The next iteration; empty when there is nothing to compute."""
        decoding = [r for r in self.running if r.stage is None and not r.is_prefilling]
        prefill: list[ScheduledChunk] = []
        budget = self._chunk
        for request in self.running:
            if request.is_prefilling and request.stage != "decode" and budget:
                budget -= _begin(prefill, request, budget)
        # Room for a decode stage is taken only when its KV is sure to come.
        for request in [r for r in self.waiting if r.stage != "decode" or r.is_offered]:
            if self._is_computed_by_another(request):
                continue
            if not budget or len(self.running) >= self._max_running or not self._admit(request):
                break
            if request.stage == "decode":
                self._granted.append(request)
            else:
                budget -= _begin(prefill, request, budget)
        return Plan(decoding, prefill)

    def _admit(self, request: Request) -> bool:
        """Take one that waits in, if there is room."""
        # Room for everybody's next token keeps a newcomer from forcing retractions at once.
        free = self.capacity - self.held - len(self.running)
        if request.num_tokens + 1 > free:
            return False
        # The last token is computed in any case: its result is the next one.
        request.computed = self._kept(request)
        self.cache.take(request.key)
        self.held += request.num_tokens
        self.cache.shrink(self.capacity - self.held)
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_arrival)
        return True

    def _kept(self, request: Request) -> int:
        """Tokens of its context that need no computing."""
        context = request.ids[: request.num_tokens - 1]
        own = self.cache.match(request.key, context)
        if own or request.stage == "decode":
            return own
        running = (common(other.ids[: other.computed], context) for other in self._siblings(request))
        return max(self.cache.match_siblings(request.head, context), *running, 0)

    def _siblings(self, request: Request) -> list[Request]:
        """RequestManager ones whose KV others may use."""
        return [r for r in self.running if r.head == request.head and r.stage != "decode" and not r.is_stale]

    def _is_computed_by_another(self, request: Request) -> bool:
        if request.stage == "decode":
            return False
        behind = [other for other in self._siblings(request) if other.is_prefilling]
        if not behind:
            return False
        kept = self._kept(request)
        context = request.ids[: request.num_tokens - 1]
        return any(common(other.ids[: other.target], context) > max(kept, other.computed) for other in behind)


def _begin(prefill: list[ScheduledChunk], request: Request, budget: int) -> int:
    count = min(budget, request.target - request.computed)
    if count:  # or a prefill stage whose whole context was kept
        prefill.append(ScheduledChunk(request, count))
    return count


def _arrival(request: Request) -> int:
    return request.arrival
