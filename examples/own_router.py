"""A router of one's own: spread by what is running, but keep a long context where its prefix is cached.

pearl run job.toml rollout.router=own_router:long_stays
"""

from collections.abc import Sequence

from pearl.core.pipeline.router import Candidate
from pearl.types.ids import Slot

LONG_TOKENS = 2048


def long_stays(context_tokens: int, last_slot: Slot | None, candidates: Sequence[Candidate]) -> Slot | None:
    if last_slot is not None and context_tokens >= LONG_TOKENS:
        return last_slot if any(c.slot == last_slot for c in candidates) else None  # None: wait for it
    least = min(candidates, key=lambda c: (c.running, -c.cached_tokens, c.slot), default=None)
    return least.slot if least else None
