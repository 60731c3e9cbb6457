"""Which requests compute how much in the next pass, and whose KV has room. Pure.

Every running request with one token to compute decodes in every pass; up to ``prefill_chunk_tokens`` more go to
contexts, first come first served. When decoding needs room, kept prefixes go first, then the youngest request is
retracted: it keeps its tokens, waits at its old place and computes them again.
"""

import bisect
from typing import NamedTuple

from pearl.workers.rollout.emulated.cache import PrefixCache
from pearl.workers.rollout.emulated.request import Request
from pearl.workers.rollout.emulated.settings import EmulatedSettings


class Work(NamedTuple):
    """Compute so many tokens of the request."""

    request: Request
    num_tokens: int


class Plan(NamedTuple):
    decoding: list[Request]
    prefill: list[Work]

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
        if not request.is_stale:
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
        """Running requests have so many more tokens."""
        self.held += num_tokens
        self.cache.shrink(self.capacity - self.held)

    def make_room(self) -> list[Request]:
        """So that everything that decodes can grow by a token; the requests that are to be retracted for it."""
        losers = []
        free = self.capacity - self.held
        num_growing = len(self.running)
        for request in reversed(self.running):
            if free >= num_growing:
                break
            losers.append(request)
            free += request.num_tokens
            num_growing -= 1
        self.cache.shrink(free - num_growing)
        return losers

    def plan(self) -> Plan:
        """The next pass; empty when there is nothing to do."""
        decoding = [request for request in self.running if not request.is_prefilling]
        prefill: list[Work] = []
        budget = self._chunk
        for request in self.running:
            if request.is_prefilling and budget:
                budget -= _begin(prefill, request, budget)
        while budget and self.waiting and len(self.running) < self._max_running:
            request = self.waiting[0]
            if not self._admit(request):
                break
            budget -= _begin(prefill, request, budget)
        return Plan(decoding, prefill)

    def _admit(self, request: Request) -> bool:
        """Take the first that waits in, if there is room."""
        # Room for everybody's next token keeps a newcomer from forcing retractions at once.
        free = self.capacity - self.held - len(self.running)
        if request.num_tokens + 1 > free:
            return False
        # The last token is computed in any case: its result is the next one.
        request.computed = self.cache.match(request.key, request.ids[: request.num_tokens - 1])
        self.cache.take(request.key)
        self.held += request.num_tokens
        self.cache.shrink(self.capacity - self.held)
        bisect.insort(self.running, self.waiting.pop(0), key=_arrival)
        return True


def _begin(prefill: list[Work], request: Request, budget: int) -> int:
    count = min(budget, request.num_tokens - request.computed)
    prefill.append(Work(request, count))
    return count


def _arrival(request: Request) -> int:
    return request.arrival
