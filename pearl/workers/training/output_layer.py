"""A model whose output layer gives log-probs of wanted tokens instead of logits.

The layer itself does the work, inside the model's forward, so that a sharded weight is gathered once and only there.
A model that changes its logits afterwards (soft caps, scales) is seen by that, and then computes them in full.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from pearl.workers.training.chunked_logprobs import Chunking, chunked_logprobs
from pearl.workers.training.packing import Packed
from pearl.workers.training.scoring import Scores, forward, score_logits

log = logging.getLogger(__name__)


def output_layer(model: PreTrainedModel) -> nn.Module:
    found = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(found, nn.Module), f"{type(model).__name__} has no output layer"
    return found


def vocabulary_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the weight of the input embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def is_tied(model: PreTrainedModel) -> bool:
    """Whether input embedding and output layer are one tensor."""
    return output_layer(model).weight is vocabulary_weight(model)


class OutputLayer:
    """Takes the place of the ``forward`` of ``model``'s output layer; between scorings that is the plain one."""

    def __init__(self, model: PreTrainedModel, num_ids: int) -> None:
        """``num_ids``: ids that may be generated; further rows of the layer are padding."""
        self._model = model
        self._num_ids = num_ids
        layer = output_layer(model)
        self._layer = layer
        self._plain: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        self._wanted: tuple[torch.Tensor, Chunking] | None = None
        self._given: torch.Tensor | None = None
        self._is_last = type(layer) is nn.Linear  # as far as is known: nothing follows it
        layer.forward = self._forward

    def score(self, packed: Packed, temperature: float, has_entropy_gradient: bool = False) -> Scores:
        """Log-probs and entropy of the packed targets. All ranks call it together."""
        if self._is_last:
            chunking = Chunking(self._num_ids, temperature, has_entropy_gradient=has_entropy_gradient)
            self._wanted = packed.targets_M, chunking
            try:
                found_M2 = forward(self._model, packed)
            finally:
                self._wanted = None
            given, self._given = self._given, None
            if found_M2 is given:
                return Scores(*given[0].unbind(-1))
            log.info("the model changes its logits after the output layer: they are computed in full")
            self._is_last = False
        logits_MV = forward(self._model, packed)[0, :, : self._num_ids]
        return score_logits(logits_MV, packed.targets_M, temperature, has_entropy_gradient)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._wanted is None:
            return self._plain(hidden)
        targets_M, chunking = self._wanted
        layer = self._layer
        assert isinstance(layer.weight, torch.Tensor)
        bias_V = layer.bias if isinstance(layer.bias, torch.Tensor) else None
        logprobs_M, entropy_M = chunked_logprobs(hidden[0], layer.weight, bias_V, targets_M, chunking)
        self._given = torch.stack((logprobs_M[None], entropy_M[None]), -1)
        return self._given
