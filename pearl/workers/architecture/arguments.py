"""The arguments that a model's layers hand to attention: those that are honoured, and the refusal of all others."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

HONOURED = ("softcap", "s_aux")
"""Limits scores to (-softcap, softcap); one learned score a head that takes part in the softmax and has no value."""
HARMLESS = frozenset(
    {
        "sliding_window",  # what it means is in the mask, which is read off the model itself
        "position_ids",
        "position_embeddings",
        "use_cache",
        "cache",
        "past_key_values",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""They do not change what attention computes from queries, keys and values."""


class Scoring(NamedTuple):
    """How scores become weights, beyond scale and mask."""

    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [H]

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def scoring_of(features: Mapping[str, Any]) -> Scoring:
    """Raises ValueError when attention is asked for something that PEARL's does not know."""
    if unknown := unknown_arguments(features):
        raise ValueError(f"its attention uses {', '.join(map(repr, unknown))}, which is not known")
    return Scoring(features.get("softcap"), features.get("s_aux"))


def unknown_arguments(features: Mapping[str, Any]) -> list[str]:
    return sorted(
        name
        for name, value in features.items()
        if value is not None
        and name not in HARMLESS
        and name not in HONOURED
        and not (name == "dropout" and value == 0.0)
        and not (name == "is_causal" and value is True)
    )
