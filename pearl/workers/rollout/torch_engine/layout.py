"""One iteration as arrays: the packed tokens, their places in the KV store, and how queries meet keys.

Requests of one iteration are put into groups for attention; inside a group all are padded to the longest in queries and
in context. Padding costs work, a further group costs the dispatch of its operations: similar ones share a group.
Letters: T tokens of the iteration, N requests of a group, Q queries each, L places of context each.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pearl.workers.architecture.masks import Mask
from pearl.workers.rollout.torch_engine.scheduler import ScheduledChunk

GROUP_COST = 4096
"""What one more group costs, in padded (query, place) pairs: about 150 us of dispatch against 0.04 us a pair."""


@dataclass(eq=False)
class Group:
    rows_NQ: torch.Tensor  # index into T of each query; padding repeats the request's last
    is_whole: bool  # the group is the whole iteration in order, one query each: no gather needed
    valid: torch.Tensor | None  # flat indices into N*Q that are no padding; None = all
    pages: torch.Tensor  # [N * pages of L]
    positions_NQ: torch.Tensor
    num_places: int  # L
    dtype: torch.dtype
    masks: dict[Mask, torch.Tensor] = field(default_factory=dict)
    biases: dict[tuple[int, Mask], torch.Tensor] = field(default_factory=dict)

    def hidden(self, mask: Mask) -> torch.Tensor:
        """[N, Q, L], true where a query does not see a place; kept for the other layers of the iteration."""
        hidden = self.masks.get(mask)
        if hidden is None:
            places = torch.arange(self.num_places, device=self.positions_NQ.device)
            hidden = self.masks[mask] = mask.hidden(self.positions_NQ[..., None], places)
        return hidden

    def bias(self, num_repeats: int, mask: Mask) -> torch.Tensor:
        """``hidden`` as [1, N, 1 or num_repeats * Q, L], additive; kept likewise."""
        bias = self.biases.get((num_repeats, mask))
        if bias is None:
            bias = self.biases[num_repeats, mask] = self._make_bias(num_repeats, mask)
        return bias

    def _make_bias(self, num_repeats: int, mask: Mask) -> torch.Tensor:
        hidden = self.hidden(mask)
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        bias_NQL = zeros.masked_fill_(hidden, float("-inf"))
        if bias_NQL.shape[1] > 1:
            bias_NQL = bias_NQL.repeat(1, num_repeats, 1)
        return bias_NQL[None]


@dataclass(eq=False)
class Layout:
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    last_rows: torch.Tensor  # rows of T whose logits are wanted, in the order of the works that end
    groups: list[Group]


def lay_out(
    works: list[ScheduledChunk], page_tokens: int, device: torch.device, dtype: torch.dtype
) -> Layout:
    """The iteration of ``works``, decoding ones first."""
    num_single = next((i for i, work in enumerate(works) if work.count > 1), len(works))
    singles = [work.request for work in works[:num_single]]
    at = np.array([r.computed for r in singles], np.int64)
    ids = [np.array([r.ids[r.computed] for r in singles], np.int64)]
    positions = [at]
    slots = [np.array([r.table[r.computed // page_tokens] for r in singles], np.int64) * page_tokens]
    slots[0] += at % page_tokens
    for work in works[num_single:]:
        start, end = work.request.computed, work.request.computed + work.count
        ids.append(work.request.ids[start:end].astype(np.int64))
        positions.append(np.arange(start, end))
        slots.append(work.request.slots(start, end))
    counts = np.array([work.count for work in works], np.int64)
    ends = counts.cumsum()
    last_rows = ends[[i for i, work in enumerate(works) if work.is_last]] - 1
    contexts = np.array([work.request.computed for work in works], np.int64) + counts
    groups = [
        _group(works, members, counts, ends, page_tokens, device, dtype)
        for members in partition(counts, contexts)
    ]
    return Layout(
        _tensor(np.concatenate(ids), device),
        _tensor(np.concatenate(positions), device),
        _tensor(np.concatenate(slots), device),
        _tensor(last_rows, device),
        groups,
    )


def partition(counts: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Indices of requests that are computed together, given their queries and context lengths."""
    lone_group = len(counts) * int(contexts.max()) * (int(counts.max()) + 1)
    if lone_group - int((contexts * (counts + 1)).sum()) <= GROUP_COST:
        return [np.arange(len(counts))]
    order = np.lexsort((contexts, counts))
    groups: list[list[int]] = []
    size = queries = places = 0
    for index in order.tolist():
        count, context = int(counts[index]), int(contexts[index])
        new_queries, new_places = max(queries, count), max(places, context)
        grown = (size + 1) * new_places * (new_queries + 1) - size * places * (queries + 1)
        if groups and grown - context * (count + 1) <= GROUP_COST:
            groups[-1].append(index)
            size, queries, places = size + 1, new_queries, new_places
        else:
            groups.append([index])
            size, queries, places = 1, count, context
    return [np.array(sorted(group)) for group in groups]


def _group(
    works: list[ScheduledChunk],
    members: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Group:
    mine = counts[members]
    queries = int(mine.max())
    offsets = np.minimum(np.arange(queries), mine[:, None] - 1)  # [N, Q]
    starts = np.array([works[i].request.computed for i in members], np.int64)[:, None]
    num_pages = -(-int((starts[:, 0] + mine).max()) // page_tokens)
    table = np.zeros((len(members), num_pages), np.int64)
    for row, index in enumerate(members):
        pages = works[index].request.table[:num_pages]
        table[row, : len(pages)] = pages
    valid = None
    if queries > 1 and (mine < queries).any():
        valid = _tensor(np.flatnonzero(np.arange(queries) < mine[:, None]), device)
    return Group(
        rows_NQ=_tensor((ends - counts)[members][:, None] + offsets, device),
        is_whole=queries == 1 and len(members) == len(works),
        valid=valid,
        pages=_tensor(table.reshape(-1), device),
        positions_NQ=_tensor(starts + offsets, device),
        num_places=num_pages * page_tokens,
        dtype=dtype,
    )


def _tensor(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
