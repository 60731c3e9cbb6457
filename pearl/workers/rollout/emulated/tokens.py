"""Which tokens an answer has, and how many: functions of the trajectory's seed and of places in it alone.

The same trajectory therefore gets the same tokens on any worker and after any interruption, whatever the weights.
"""

import numpy as np
import numpy.typing as npt

from pearl.runtime.counter_rng import counter_bits, lognormal
from pearl.types import emulated_tokens
from pearl.types.splitmix import splitmix64
from pearl.types.trajectory import FinishReason
from pearl.workers.rollout.protocol import GenerateRequest

LOGPROB = -1.0
"""Of every token: nothing is learnt from it, it only has to be finite."""

Ids = npt.NDArray[np.int32]
NOTHING: Ids = np.empty(0, np.int32)


def answer(request: GenerateRequest, vocabulary_size: int, length_spread: float) -> tuple[Ids, FinishReason]:
    """Return the ids that follow ``request.ids`` and why they end there; at least one token when any are allowed."""
    context = len(request.ids)
    # Greedy is the same for every trajectory, as it is for a model.
    seed = 0 if request.params.temperature == 0.0 else request.seed
    positions = np.arange(context, context + request.params.max_new_tokens)
    low, high = 0, vocabulary_size
    if vocabulary_size == emulated_tokens.VOCABULARY_SIZE:
        low, high = emulated_tokens.FIRST_CONTENT_ID, emulated_tokens.LENGTH_BASE
    drawn = counter_bits(np.uint64(splitmix64(seed)), positions) % np.uint64(high - low)
    ids: Ids = (drawn + np.uint64(low)).astype(np.int32)
    stop_ids = request.params.stop_ids
    if not stop_ids:
        return ids, "length"
    if vocabulary_size == emulated_tokens.VOCABULARY_SIZE:
        left = max(1, answer_end(request.ids, seed, length_spread) - context)
        if left <= len(ids):
            ids[left - 1] = stop_ids[0]
    stops = np.flatnonzero(np.isin(ids, stop_ids))
    if len(stops):
        return ids[: stops[0] + 1], "stop"
    return ids, "length"


def answer_end(ids: Ids, seed: int, length_spread: float) -> int:
    """The length of the context when the answer it is in is complete; beyond any limit when nobody asked for one."""
    asking = np.flatnonzero(ids >= emulated_tokens.LENGTH_BASE)
    if not len(asking):
        return 1 << 40
    start = int(asking[-1]) + 1
    wanted = int(ids[start - 1]) - emulated_tokens.LENGTH_BASE
    return start + max(1, round(lognormal(wanted, length_spread, seed, start)))
