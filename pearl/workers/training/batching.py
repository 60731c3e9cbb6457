"""How a batch is cut: samples to ranks by their work, a rank's samples to micro-batches of a token budget.

Pure and the same on every rank. All ranks run equally many micro-batches, empty ones included, so that their
collectives always meet.
"""

import heapq
from collections.abc import Callable, Sequence

Plan = list[list[list[int]]]
"""[rank][micro-batch] -> indices of samples."""


def cut(
    lengths: Sequence[int],
    num_ranks: int,
    tokens_per_micro_batch: int,
    work: Callable[[int], int] = lambda length: length,
) -> Plan:
    """Every index of ``lengths`` (tokens a sample) exactly once. A sample longer than the budget is alone.

    ``work`` grows with the length: what a sample of so many tokens costs a rank.
    """
    shares = balance(lengths, num_ranks, work)
    ranks = [_micro_batches(share, lengths, tokens_per_micro_batch) for share in shares]
    most = max(len(batches) for batches in ranks)
    return [batches + [[] for _ in range(most - len(batches))] for batches in ranks]


def balance(
    lengths: Sequence[int], num_ranks: int, work: Callable[[int], int] = lambda length: length
) -> list[list[int]]:
    """The longest sample first, each to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + work(lengths[index]), rank))
    return shares


def _micro_batches(share: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Consecutive in length, so that attention pads little."""
    batches: list[list[int]] = []
    tokens = budget
    for index in share:
        if tokens + lengths[index] > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return batches


def deal_groups(groups: Sequence[int], num_updates: int) -> list[list[int]]:
    """Indices of the samples of each optimizer step: whole groups, in prompt order, as equal in number as can be."""
    order = sorted(set(groups))
    updates: list[list[int]] = []
    for update in range(num_updates):
        first, end = (len(order) * edge // num_updates for edge in (update, update + 1))
        chosen = set(order[first:end])
        updates.append([index for index, group in enumerate(groups) if group in chosen])
    return updates
