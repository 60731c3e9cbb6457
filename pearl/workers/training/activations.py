"""Activations that are computed again in the backward pass instead of being kept: one input a layer and token."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that a model says must not be split, in the order they run."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_activations(layer: nn.Module) -> None:
    """Call before the layer is sharded: its hooks, which gather weights, then stay outside of what is repeated.

    ``transformers`` has its own switch, which works in training mode only, with dropout as the model's authors set it.
    """
    plain = layer.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        return checkpoint(partial(plain, **options), *inputs, use_reentrant=False, preserve_rng_state=False)

    layer.forward = forward
