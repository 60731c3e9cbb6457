"""Which worker continues a trajectory: a pure choice among the workers that may.

The caller has left out workers that are not active, are full, or serve a version the trajectory may not use.
Costs are counted in requests: a worker's queue, plus what must be prefilled again there.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pearl.types.ids import Slot

PREFILL_TOKENS_PER_REQUEST = 4096
"""Prefilling this many tokens costs a worker about what one more running request does: with the workload of
paper §6.1, a turn of 268 tokens at about 8 ms an iteration against 24 us a prefilled token, within a factor of 2."""


class Candidate(NamedTuple):
    slot: Slot
    running: int
    cached_tokens: int  # of this trajectory's context, in this worker's cache


class DecodeCandidate(NamedTuple):
    slot: Slot
    running: int
    free_tokens: int  # of KV capacity that is not spoken for


def choose_decode(context_tokens: int, candidates: Sequence[DecodeCandidate]) -> Slot | None:
    """The shortest queue among those with room for the context, else the one with the most room."""
    roomy = [c for c in candidates if c.free_tokens >= context_tokens]
    if roomy:
        return min(roomy, key=lambda c: (c.running, -c.free_tokens, c.slot)).slot
    return min(candidates, key=lambda c: (-c.free_tokens, c.slot)).slot if candidates else None


Strategy = Callable[[int, Slot | None, Sequence[Candidate]], Slot | None]
"""(context tokens, last_slot, candidates) -> slot, or None to wait. ``last_slot`` served the trajectory last and still
lives (perhaps not among the candidates)."""


def least_loaded(context_tokens: int, last_slot: Slot | None, candidates: Sequence[Candidate]) -> Slot | None:
    """The shortest queue; ties go to the lowest slot."""
    return min(candidates, key=lambda c: (c.running, c.slot)).slot if candidates else None


def sticky(context_tokens: int, last_slot: Slot | None, candidates: Sequence[Candidate]) -> Slot | None:
    """Stay with the first worker for ever, waiting for it when it is full or updating (as ROLL)."""
    if last_slot is None:
        return least_loaded(context_tokens, last_slot, candidates)
    return last_slot if any(c.slot == last_slot for c in candidates) else None


def cache_aware(context_tokens: int, last_slot: Slot | None, candidates: Sequence[Candidate]) -> Slot | None:
    """Stay with the cached prefix unless another worker is shorter by at least a request after paying
    for the prefill."""
    best: Candidate | None = None
    best_cost = prefix_cost = float("inf")
    for candidate in candidates:
        uncached = context_tokens - candidate.cached_tokens
        cost = candidate.running + uncached / PREFILL_TOKENS_PER_REQUEST
        if candidate.slot == last_slot:
            prefix_cost = cost
        if cost < best_cost:
            best, best_cost = candidate, cost
    if best is None:
        return None
    return last_slot if last_slot is not None and prefix_cost < best_cost + 1.0 else best.slot


def cache_aware_prefill(
    context_tokens: int, last_slot: Slot | None, candidates: Sequence[Candidate]
) -> Slot | None:
    """``cache_aware`` among workers that only prefill: a request in the queue costs what it prefills, about as many
    tokens as this one where most of its prefix is cached."""
    least = min((context_tokens - c.cached_tokens for c in candidates), default=0)
    unit = max(1, least)
    costs = {c.slot: c.running * unit + context_tokens - c.cached_tokens for c in candidates}
    best = min(costs, key=lambda slot: costs[slot], default=None)
    if best is None:
        return None
    return last_slot if last_slot in costs and costs[last_slot] < costs[best] + unit else best


STRATEGIES: dict[str, Strategy] = {
    "sticky": sticky,
    "least-loaded": least_loaded,
    "cache-aware": cache_aware,
}
PREFILL_STRATEGIES: dict[str, Strategy] = {**STRATEGIES, "cache-aware": cache_aware_prefill}
