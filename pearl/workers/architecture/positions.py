"""Positions whose meaning depends on how long an iteration is: one choice a run, from the longest context it allows.

``transformers`` picks the factors of a "longrope" anew in each forward, from the largest position in it. Many
sequences of an iteration would then change one another, and keys in a cache would not fit later queries.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED = "default"
"""As the rope type of a module: its frequencies are not touched any more."""


def freeze_positions(model: PreTrainedModel, max_context_tokens: int) -> None:
    """Make every position mean the same in all iterations of a run.

    Raises:
        ValueError: the model needs more than one choice below ``max_context_tokens``.
    """
    for module in model.modules():
        if hasattr(module, "rope_type"):
            for layer_type, rope_type in _types(module):
                _freeze_rope(module, layer_type, rope_type, max_context_tokens)
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale"):
            _freeze_temperature(module, max_context_tokens)


def _types(module: Any) -> Iterator[tuple[str | None, str]]:
    kinds: Any = module.rope_type
    if isinstance(kinds, dict):
        yield from list(kinds.items())
    else:
        yield None, kinds


def _freeze_rope(module: Any, layer_type: str | None, rope_type: str, max_context_tokens: int) -> None:
    if rope_type == "longrope":
        original = int(_parameters(module, layer_type)["original_max_position_embeddings"])
        if max_context_tokens > original:
            _set_long(module, layer_type, original + 1)
    elif "dynamic" in rope_type:
        original = int(module.original_max_seq_len)
        if max_context_tokens > original:
            raise ValueError(
                f"its rope is of type {rope_type!r}, which stretches with each context beyond {original} tokens; "
                f"set rollout.max_context_tokens to at most {original}"
            )
    else:
        return
    if layer_type is None:
        module.rope_type = FIXED
    else:
        module.rope_type = {**module.rope_type, layer_type: FIXED}


def _parameters(module: Any, layer_type: str | None) -> Any:
    config: Any = module.config
    return config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]


@torch.no_grad()
def _set_long(module: Any, layer_type: str | None, num_tokens: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer: Any = getattr(module, f"{prefix}inv_freq")
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, buffer.device, seq_len=num_tokens, **options
    )
    buffer.copy_(frequencies)


def _freeze_temperature(module: Any, max_context_tokens: int) -> None:
    """Llama 4 scales queries by their place in the row of an iteration; below ``floor_scale`` the scale is 1."""
    limit = int(module.floor_scale) - 1
    if max_context_tokens > limit:
        raise ValueError(
            f"its attention changes with the place in a row from {limit + 1} tokens on; set "
            f"rollout.max_context_tokens to at most {limit}"
        )
    module.attn_temperature_tuning = False
