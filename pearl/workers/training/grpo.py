"""The loss of a micro-batch and what it reports, put together from the parts that the settings choose.

Pure functions; nothing here knows how the batch was cut. Letter: M trained tokens of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pearl.workers.training.objectives import (
    Kind,
    KlEstimator,
    Level,
    Objective,
    Rows,
    correction_weights,
    kl_estimates,
    policy_gain,
)


@dataclass(frozen=True, slots=True)
class LossSettings:
    clip_low: float
    clip_high: float
    tis_cap: float  # upper bound of the correction
    kl_coefficient: float
    objective: Objective = "ppo"
    correction_level: Level = "token"
    correction_kind: Kind = "truncate"
    correction_low: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0
    own_name: str = ""
    own: "Callable[[torch.Tensor, TokenBatch], Any] | None" = None  # in place of objective and correction


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss needs of each trained token beside its log-prob."""

    old_M: torch.Tensor  # training log-prob at the start of the step
    rollout_M: torch.Tensor  # log-prob when it was sampled
    advantages_M: torch.Tensor
    reference_M: torch.Tensor | None  # log-prob under the reference weights; None without a KL term
    rows_M: torch.Tensor | None = (
        None  # its trajectory's place in the micro-batch; None: all tokens are of one
    )
    shares_M: torch.Tensor | None = None  # of the token in the batch's loss; None = 1 each


STATISTICS = ("policy_loss", "kl", "clip_ratio", "tis_mean", "tis_capped_ratio", "ratio_mean")
"""Columns of the sums that ``token_losses`` returns; divided by the batch's tokens they are its means."""


def token_losses(
    logprobs_M: torch.Tensor,
    batch: TokenBatch,
    settings: LossSettings,
    entropy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the tokens' losses, each times its share; plain sums in the order of STATISTICS).

    A token's loss is -w g + c KL - e H: g the objective's gain, w the correction between engine and trainer without
    gradient, KL the estimate of the divergence from the reference weights, H the entropy.
    """
    rows = Rows(batch.rows_M if batch.rows_M is not None else torch.zeros_like(logprobs_M, dtype=torch.long))
    gain_M, ratio_M, is_clipped_M = policy_gain(
        settings.objective,
        logprobs_M,
        batch.old_M,
        batch.advantages_M,
        rows,
        settings.clip_low,
        settings.clip_high,
    )
    weight_M, is_out_M = correction_weights(
        settings.correction_level,
        settings.correction_kind,
        settings.correction_low,
        settings.tis_cap,
        batch.old_M,
        batch.rollout_M,
        rows,
    )
    policy_M = -weight_M * gain_M
    if settings.own is not None:
        policy_M = _checked(settings.own_name, settings.own(logprobs_M, batch), logprobs_M)
    kl_M = torch.zeros_like(logprobs_M, requires_grad=False)
    if batch.reference_M is not None:
        kl_M = kl_estimates(settings.kl_estimator, logprobs_M, batch.reference_M)
    loss_M = policy_M + settings.kl_coefficient * kl_M
    if settings.entropy_coefficient and entropy_M is not None:
        loss_M = loss_M - settings.entropy_coefficient * entropy_M
    total = (loss_M if batch.shares_M is None else loss_M * batch.shares_M).sum()
    with torch.no_grad():
        columns = (policy_M, kl_M, is_clipped_M, weight_M, is_out_M, ratio_M)
        sums = torch.stack([column.sum(dtype=torch.float64) for column in columns])
    return total, sums


def _checked(name: str, losses_M: Any, logprobs_M: torch.Tensor) -> torch.Tensor:
    if not isinstance(losses_M, torch.Tensor) or losses_M.shape != logprobs_M.shape:
        given = tuple(losses_M.shape) if isinstance(losses_M, torch.Tensor) else type(losses_M).__name__
        raise ValueError(
            f'training.loss = "{name}" gave {given} for {len(logprobs_M)} tokens; give a tensor with a loss for each '
            "token, which is then summed as training.loss_aggregation says"
        )
    return losses_M
