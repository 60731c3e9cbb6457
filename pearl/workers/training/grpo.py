"""Group-relative policy optimisation: advantages in a group, the token-level clipped loss, and what it reports.

Pure functions; nothing here knows how the batch was cut. Shapes: S samples, M trained tokens of a micro-batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

SPREAD_LIMIT = 1e-6
"""Rewards of a group closer than this (relative to the largest, or absolute below 1) are equal: their differences
are rounding residue, which dividing by the deviation would blow up."""
STD_EPSILON = 1e-6
MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before exp: far outside any clip range, and finite in float32."""


def group_advantages(
    rewards_S: npt.NDArray[np.float64],
    groups_S: npt.NDArray[np.int64],
    masked_S: npt.NDArray[np.bool_],
    normalize_by_std: bool,
) -> npt.NDArray[np.float64]:
    """Advantage of each sample against its group: (r - mean) / (std + 1e-6), or r - mean.

    Mean and (population) deviation are those of the group's unmasked members. A member without a generated token
    has no loss, but its reward is real, so it counts in the baseline. Masked members, equal rewards and groups of
    one give exactly 0.
    """
    advantages_S = np.zeros(len(rewards_S))
    for group in np.unique(groups_S[~masked_S]):
        members = np.flatnonzero((groups_S == group) & ~masked_S)
        advantages_S[members] = _advantages(rewards_S[members], normalize_by_std)
    return advantages_S


def _advantages(rewards: npt.NDArray[np.float64], normalize_by_std: bool) -> npt.NDArray[np.float64]:
    scale = max(1.0, float(np.abs(rewards).max()))
    if float(np.ptp(rewards)) <= SPREAD_LIMIT * scale:
        return np.zeros(len(rewards))
    centred: npt.NDArray[np.float64] = rewards - rewards.mean()
    return centred / (centred.std() + STD_EPSILON) if normalize_by_std else centred


def shuffle_in_groups(
    advantages_S: npt.NDArray[np.float64],
    groups_S: npt.NDArray[np.int64],
    masked_S: npt.NDArray[np.bool_],
    seed: int,
    step: int,
) -> npt.NDArray[np.float64]:
    """The control experiment: each group's advantages go to random members; the same for the same (seed, step)."""
    shuffled_S = advantages_S.copy()
    for group in np.unique(groups_S[~masked_S]):
        members = np.flatnonzero((groups_S == group) & ~masked_S)
        order = np.random.default_rng([abs(seed), step, int(group)]).permutation(len(members))
        shuffled_S[members] = advantages_S[members[order]]
    return shuffled_S


@dataclass(frozen=True, slots=True)
class LossSettings:
    clip_low: float
    clip_high: float
    tis_cap: float
    kl_coefficient: float


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss needs of each trained token beside its log-prob."""

    old_M: torch.Tensor  # training log-prob at the start of the step
    rollout_M: torch.Tensor  # log-prob when it was sampled
    advantages_M: torch.Tensor
    reference_M: torch.Tensor | None  # log-prob under the initial weights; None without a KL term


STATISTICS = ("policy_loss", "kl", "clip_ratio", "tis_mean", "tis_capped_ratio", "ratio_mean")
"""Columns of the sums that ``token_losses`` returns; divided by the batch's tokens they are its means."""


def token_losses(
    logprobs_M: torch.Tensor, batch: TokenBatch, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the tokens' losses, sums in the order of STATISTICS).

    A token's loss is -w min(q A, clip(q) A) + c k3: q = pi / pi_old, w = min(pi_old / pi_rollout, cap) without
    gradient, A its sample's advantage, k3 the low-variance estimate of the KL divergence to the initial weights.
    The caller divides by the number of trained tokens of the whole batch, never of a part of it.
    """
    ratio_M = (logprobs_M - batch.old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_M = ratio_M.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain_M = torch.minimum(ratio_M * batch.advantages_M, clipped_M * batch.advantages_M)
    raw_M = (batch.old_M - batch.rollout_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight_M = raw_M.clamp(max=settings.tis_cap).detach()
    policy_M = -weight_M * gain_M
    kl_M = _k3(logprobs_M, batch.reference_M)
    total = (policy_M + settings.kl_coefficient * kl_M).sum()
    with torch.no_grad():
        is_clipped_M = gain_M < ratio_M * batch.advantages_M
        columns = (policy_M, kl_M, is_clipped_M, weight_M, raw_M > settings.tis_cap, ratio_M)
        sums = torch.stack([column.sum(dtype=torch.float64) for column in columns])
    return total, sums


def _k3(logprobs_M: torch.Tensor, reference_M: torch.Tensor | None) -> torch.Tensor:
    if reference_M is None:
        return torch.zeros_like(logprobs_M, requires_grad=False)
    difference_M = (reference_M - logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_M.exp() - difference_M - 1
