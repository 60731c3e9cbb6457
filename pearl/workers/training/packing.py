"""Sequences of a micro-batch in one row, and attention that keeps them apart.

All linear layers see exactly the real tokens, and logits are computed only where a trained token is predicted.
Inside attention the row is spread out to one padded row a sequence; padding lies on the right, where causal
attention never looks from a real token. Letters: T packed tokens, N sequences, L the longest, M trained tokens;
H query heads, K key-value heads, D head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

from pearl.workers.architecture import eager
from pearl.workers.architecture.arguments import scoring_of
from pearl.workers.architecture.attach import mask_of
from pearl.workers.architecture.masks import Mask

NAME = "pearl_packed"


class PaddingMap(NamedTuple):
    """How packed places become padded ones and back."""

    num_rows: int
    row_tokens: int  # L
    sources: torch.Tensor | None  # [N * L]: packed place of each padded one; None when nothing is padded
    places: torch.Tensor | None  # [T]: padded place of each packed one


class Packed(NamedTuple):
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    spread: PaddingMap
    queries_M: torch.Tensor  # packed places whose logits predict the trained tokens
    targets_M: torch.Tensor


def pack(
    ids: Sequence[npt.NDArray[np.int32]], trained: Sequence[npt.NDArray[np.int64]], device: torch.device
) -> Packed:
    """Each sequence cut behind its last prediction; ``trained`` holds its trained positions, ascending, from 1.

    Without sequences it is one token that predicts nothing, for ranks that only join the collectives.
    """
    if not ids:
        ids, trained = [np.zeros(1, np.int32)], [np.zeros(0, np.int64)]
    lengths = np.array([int(positions[-1]) if len(positions) else 1 for positions in trained], np.int64)
    starts = np.cumsum(lengths) - lengths
    parts = zip(ids, trained, lengths, starts, strict=True)
    cut, places, queries, targets = [], [], [], []
    for sequence, positions, length, start in parts:
        cut.append(sequence[:length])
        places.append(np.arange(length))
        queries.append(positions - 1 + start)
        targets.append(sequence[positions])

    def tensor(pieces: list[npt.NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(pieces).astype(np.int64)).to(device)

    return Packed(tensor(cut), tensor(places), _spread(lengths, device), tensor(queries), tensor(targets))


def _spread(lengths: npt.NDArray[np.int64], device: torch.device) -> PaddingMap:
    longest = int(lengths.max())
    if (lengths == longest).all():
        return PaddingMap(len(lengths), longest, None, None)
    columns = np.arange(longest)
    is_real = columns < lengths[:, None]
    # Padding repeats the row's last token, so that the gather stays within the row.
    starts = np.cumsum(lengths) - lengths
    sources = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    return PaddingMap(
        len(lengths),
        longest,
        torch.from_numpy(sources.reshape(-1)).to(device),
        torch.from_numpy(np.flatnonzero(is_real)).to(device),
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    spread: PaddingMap | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] each -> [1, T, H, D].

    The layer's mask is the one that ``attach_attention`` found; ``attention_mask`` is not made for this attention.
    """
    assert spread is not None, "the model does not hand its arguments on to attention"
    scoring, mask = scoring_of(features), mask_of(module)
    query_NHLD, key_NKLD, value_NKLD = (_pad(states[0], spread) for states in (query, key, value))
    if scoring.is_plain:
        seen = ~_hidden(mask, spread, query.device) if mask.hides_past(spread.row_tokens) else None
        output_NHLD = functional.scaled_dot_product_attention(
            query_NHLD,
            key_NKLD,
            value_NKLD,
            attn_mask=seen,
            is_causal=seen is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        hidden = _hidden(mask, spread, query.device)
        output_NHLD = eager.attend(query_NHLD, key_NKLD, value_NKLD, hidden, scaling, scoring)
    output_THD = output_NHLD.transpose(1, 2).flatten(0, 1)
    if spread.places is not None:
        output_THD = output_THD.index_select(0, spread.places)
    return output_THD[None], None


def _pad(states: torch.Tensor, spread: PaddingMap) -> torch.Tensor:
    """[heads, T, D] -> [N, heads, L, D]."""
    if spread.sources is not None:
        states = states.index_select(1, spread.sources)
    return states.view(len(states), spread.num_rows, spread.row_tokens, -1).transpose(0, 1)


def _hidden(mask: Mask, spread: PaddingMap, device: torch.device) -> torch.Tensor:
    """[L, L]: which keys each query does not see."""
    places = torch.arange(spread.row_tokens, device=device)
    return mask.hidden(places[:, None], places)


AttentionInterface.register(NAME, packed_attention)
