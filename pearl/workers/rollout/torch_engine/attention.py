"""Attention over paged KV, registered with ``transformers`` so that any model's own forward runs on it.

The store keeps heads outermost, so that gathered pages are already the contiguous operands of attention. Letters
as in ``layout``; H query heads, K key-value heads, R = H / K queries of one key head, D head size.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

from pearl.workers.architecture import eager
from pearl.workers.architecture.arguments import Scoring, scoring_of
from pearl.workers.architecture.attach import mask_of
from pearl.workers.architecture.masks import Mask
from pearl.workers.rollout.torch_engine.layout import Group, Layout

NAME = "pearl_paged"


class KvStore:
    """Keys and values of every layer, made when a layer first stores something; page 0 stays zero."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._num_pages = num_pages + 1
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values, each [K, pages, tokens of a page, D]."""

    def write(
        self, layer: int, slots_T: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor
    ) -> None:
        if layer not in self.layers:
            self.layers[layer] = (self._make(key_KTD), self._make(value_KTD))
        keys, values = self.layers[layer]
        keys.flatten(1, 2).index_copy_(1, slots_T, key_KTD)
        values.flatten(1, 2).index_copy_(1, slots_T, value_KTD)

    def gather(self, layer: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as [K, N, L, D]."""
        keys, values = self.layers[layer]
        shape = (keys.shape[0], -1, group.num_places)
        return (
            keys.flatten(2).index_select(1, group.pages).view(*shape, keys.shape[3]),
            values.flatten(2).index_select(1, group.pages).view(*shape, values.shape[3]),
        )

    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy token places; all are read before any is written."""
        for store in self._stores():
            source, target = (torch.from_numpy(slots).to(store.device) for slots in (sources, targets))
            store.index_copy_(1, target, store.index_select(1, source))

    def zero(self, slots: npt.NDArray[np.int64]) -> None:
        for store in self._stores():
            store.index_fill_(1, torch.from_numpy(slots).to(store.device), 0.0)

    def tensors(self) -> list[torch.Tensor]:
        """All its memory so far."""
        return [store for pair in self.layers.values() for store in pair]

    def _stores(self) -> list[torch.Tensor]:
        return [store.flatten(1, 2) for pair in self.layers.values() for store in pair]

    def _make(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((like.shape[0], self._num_pages, self.page_tokens, like.shape[2]))


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    store: KvStore | None = None,
    layout: Layout | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] each, tokens of all requests in a row -> [1, T, H, D].

    The layer's mask is the one that ``attach_attention`` found; ``attention_mask`` is not made for this attention.
    """
    assert store is not None, "the model does not hand its arguments on to attention"
    assert layout is not None
    scoring, mask = scoring_of(features), mask_of(module)
    layer: int = module.layer_idx  # type: ignore[assignment]
    store.write(layer, layout.slots_T, key[0], value[0])
    queries_KRTD = query[0].view(key.shape[1], -1, *query.shape[2:])

    def attend(group: Group) -> torch.Tensor:
        keys, values = store.gather(layer, group)
        if scoring.is_plain:
            return _attend(keys, values, group, queries_KRTD, scaling, mask)
        return _attend_eagerly(keys, values, group, queries_KRTD, scaling, mask, scoring)

    if layout.groups[0].is_whole:
        return attend(layout.groups[0])[None], None
    output_THD = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
    for group in layout.groups:
        picked_THD = attend(group)
        rows = group.rows_NQ.flatten()
        if group.valid is not None:
            rows, picked_THD = rows[group.valid], picked_THD[group.valid]
        output_THD.index_copy_(0, rows, picked_THD)
    return output_THD[None], None


def _attend(
    keys: torch.Tensor,
    values: torch.Tensor,
    group: Group,
    queries_KRTD: torch.Tensor,
    scaling: float | None,
    mask: Mask,
) -> torch.Tensor:
    """The group's output as [N * Q, H, D]."""
    num_repeats = queries_KRTD.shape[1]
    if group.is_whole:
        queries = queries_KRTD.transpose(1, 2)  # [K, N, R, D]
    else:
        picked = queries_KRTD[:, :, group.rows_NQ]  # [K, R, N, Q, D]
        queries = picked.transpose(1, 2).flatten(2, 3)  # [K, N, R * Q, D]
    # The queries of one key head count as more queries, so keys and values are never repeated.
    bias = group.bias(num_repeats, mask)
    output = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scaling)
    split = output.view(*output.shape[:2], num_repeats, -1, output.shape[3])  # [K, N, R, Q, D]
    return split.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _attend_eagerly(
    keys: torch.Tensor,
    values: torch.Tensor,
    group: Group,
    queries_KRTD: torch.Tensor,
    scaling: float | None,
    mask: Mask,
    scoring: Scoring,
) -> torch.Tensor:
    """Compute what ``_attend`` does, for cases that its kernel lacks."""
    queries = queries_KRTD[:, :, group.rows_NQ].permute(2, 0, 1, 3, 4).flatten(1, 2)  # [N, H, Q, D]
    hidden = group.hidden(mask)[:, None, None]
    output = eager.attend(queries, keys.transpose(0, 1), values.transpose(0, 1), hidden, scaling, scoring)
    return output.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(NAME, paged_attention)
