"""Layers that carry a state from token to token, by what the model itself says of them."""

from torch import nn
from transformers import PreTrainedModel

LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "dense",
    "sparse",
    "moe",
}
"""Values of ``config.layer_types`` that keep nothing but keys and values."""


def recurrent_parts(model: PreTrainedModel) -> list[str]:
    """Why it cannot be computed token by token from keys and values alone; empty = it can."""
    config = model.config.get_text_config()
    problems = []
    types = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - LAYER_TYPES
    if types:
        problems.append(f"its layers of type {', '.join(sorted(types))} carry a state from token to token")
    elif getattr(model, "_is_stateful", False):
        problems.append("its layers carry a state from token to token (recurrent or convolutional)")
    text_parts = [module for module in model.modules() if isinstance(module, nn.Conv1d)]
    if not problems and any(layer.kernel_size[0] > 1 and _is_causal(layer) for layer in text_parts):
        problems.append("it has causal convolutions over tokens")
    return problems


def _is_causal(layer: nn.Conv1d) -> bool:
    """Padded on the left by all of its kernel but one, as a convolution over a growing sequence is."""
    return layer.padding == (layer.kernel_size[0] - 1,)
