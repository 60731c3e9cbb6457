"""Log-probs of given tokens under the model, of the distribution they were sampled from."""

from typing import NamedTuple, cast

import torch
from torch import nn

from pearl.workers.training.packing import Packed


class Scores(NamedTuple):
    """M trained tokens of a micro-batch."""

    logprobs_M: torch.Tensor
    entropy_M: torch.Tensor  # nats


def score(model: nn.Module, packed: Packed, temperature: float, vocabulary_size: int | None = None) -> Scores:
    """Score by way of all logits; ``temperature`` is the rollout's: softmax(logits / temperature), and 1 for the
    greedy 0."""
    logits_MV = forward(model, packed)[0, :, :vocabulary_size]
    return score_logits(logits_MV, packed.targets_M, temperature)


def forward(model: nn.Module, packed: Packed) -> torch.Tensor:
    """Return what the model's output layer and all after it give for the tokens that predict: [1, M, ...]."""
    output = model(
        input_ids=packed.ids_T[None],
        position_ids=packed.positions_T[None],
        use_cache=False,
        logits_to_keep=packed.queries_M,
        spread=packed.spread,
    )
    return cast(torch.Tensor, output.logits)


def score_logits(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, temperature: float, has_entropy_gradient: bool = False
) -> Scores:
    scaled_MV = logits_MV.float()
    if temperature not in (0.0, 1.0):
        scaled_MV = scaled_MV / temperature
    logprobs_MV = scaled_MV.log_softmax(-1)
    logprobs_M = logprobs_MV.gather(-1, targets_M[:, None])[:, 0]
    with torch.set_grad_enabled(torch.is_grad_enabled() and has_entropy_gradient):
        probabilities_MV = logprobs_MV.exp()
        # An impossible token contributes nothing to the entropy, not 0 * -inf.
        entropy_M = -(probabilities_MV * logprobs_MV.masked_fill(probabilities_MV == 0, 0.0)).sum(-1)
    return Scores(logprobs_M, entropy_M)
