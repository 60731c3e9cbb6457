"""Makes a real model use an attention of PEARL's, with the mask of each of its layers."""

import torch
from transformers import PreTrainedModel

from pearl.workers.architecture.masks import Mask
from pearl.workers.architecture.positions import freeze_positions
from pearl.workers.architecture.survey import survey

ATTRIBUTE = "pearl_mask"


def attach_attention(model: PreTrainedModel, name: str, max_context_tokens: int) -> int:
    """Let all layers of ``model`` call the attention registered as ``name`` -> the number of its layers.

    Raises:
        ValueError: the model cannot run on it; says why.
    """
    found = survey(model.config, max_context_tokens)
    if found.problems:
        raise ValueError(f"{type(model).__name__}: {'; '.join(found.problems)}")
    freeze_positions(model, max_context_tokens)
    model.set_attn_implementation(name)
    for path, mask in found.masks.items():
        setattr(model.get_submodule(path), ATTRIBUTE, mask)
    return len(found.masks)


def mask_of(module: torch.nn.Module) -> Mask:
    """Return the mask of the layer that calls attention."""
    mask = getattr(module, ATTRIBUTE)
    assert isinstance(mask, Mask)
    return mask
