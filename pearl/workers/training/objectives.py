"""What a token's place in the loss is: the policy term, the weight of its origin, the distance to a reference.

Pure functions. A trajectory lies whole in one micro-batch, so what is taken over its tokens is the same however the
batch is cut. Letters: M trained tokens of a micro-batch, R its trajectories.
"""

from typing import Literal

import torch

Objective = Literal["ppo", "gspo", "cispo"]
Level = Literal["token", "sequence", "geometric", "none"]
Kind = Literal["truncate", "mask"]
KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before exp: far outside any clip range, and finite in float32."""


class Rows:
    """Which trajectory of the micro-batch each token belongs to, as places from 0."""

    def __init__(self, rows_M: torch.Tensor) -> None:
        self._rows_M = rows_M
        self._num_rows = int(rows_M.max()) + 1 if len(rows_M) else 0

    def sums(self, values_M: torch.Tensor) -> torch.Tensor:
        """The sum over each token's trajectory, at the token."""
        sums_R = values_M.new_zeros(self._num_rows).index_add(0, self._rows_M, values_M)
        return sums_R[self._rows_M]

    def means(self, values_M: torch.Tensor) -> torch.Tensor:
        """The mean over each token's trajectory, at the token."""
        return self.sums(values_M) / self.sums(torch.ones_like(values_M))


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def policy_gain(
    objective: Objective,
    logprobs_M: torch.Tensor,
    old_M: torch.Tensor,
    advantages_M: torch.Tensor,
    rows: Rows,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gain to be maximised, ratio, whether the clip took part) of each token; q = pi / pi_old.

    - ppo: min(q A, clip(q) A).
    - gspo: the same with the geometric mean of q over the trajectory, which each of its tokens then has.
    - cispo: clip(q) A log pi, where clip(q) has no gradient: every token keeps one, however far it has moved.
    """
    log_ratio_M = logprobs_M - old_M
    if objective == "gspo":
        log_ratio_M = rows.means(log_ratio_M)
    ratio_M = bounded_exp(log_ratio_M)
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    if objective == "cispo":
        return clipped_M.detach() * advantages_M * logprobs_M, ratio_M, clipped_M != ratio_M
    gain_M = torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    return gain_M, ratio_M, gain_M < ratio_M * advantages_M


@torch.no_grad()
def correction_weights(
    level: Level,
    kind: Kind,
    low: float,
    high: float,
    old_M: torch.Tensor,
    rollout_M: torch.Tensor,
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, whether it was out of bounds) of each token: how much likelier the trainer finds it than the engine.

    The ratio pi_old / pi_rollout of the token, its product over the trajectory ("sequence") or its geometric mean;
    out of ``low`` to ``high`` it becomes the bound (truncate) or 0 (mask).
    """
    if level == "none":
        return torch.ones_like(old_M), torch.zeros_like(old_M, dtype=torch.bool)
    log_ratio_M = old_M - rollout_M
    if level != "token":
        log_ratio_M = rows.sums(log_ratio_M) if level == "sequence" else rows.means(log_ratio_M)
    raw_M = bounded_exp(log_ratio_M)
    is_out_M = (raw_M < low) | (raw_M > high)
    weight_M = raw_M.clamp(low, high) if kind == "truncate" else raw_M.masked_fill(is_out_M, 0.0)
    return weight_M, is_out_M


def kl_estimates(estimator: KlEstimator, logprobs_M: torch.Tensor, reference_M: torch.Tensor) -> torch.Tensor:
    """Estimate the divergence from the reference per token, with d = log pi - log pi_reference.

    k1 = d (unbiased, as a loss without use), k2 = d^2 / 2 (its gradient is the divergence's), k3 = exp(-d) - 1 + d
    (unbiased and never negative).
    """
    if estimator == "k1":
        return logprobs_M - reference_M
    if estimator == "k2":
        return (logprobs_M - reference_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2
    difference_M = (reference_M - logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_M.exp() - difference_M - 1
