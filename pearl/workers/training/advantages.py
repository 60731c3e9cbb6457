"""Advantages: how much better a trajectory did than others of its prompt. Letter: S samples of a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pearl.runtime.extensions import load_extension

SPREAD_LIMIT = 1e-6
"""Rewards of a group closer than this (relative to the largest, or absolute below 1) are equal: their differences
are rounding residue, which dividing by the deviation would blow up."""
STD_EPSILON = 1e-6

Rewards = npt.NDArray[np.float64]
Groups = npt.NDArray[np.int64]
Masked = npt.NDArray[np.bool_]
AdvantageFunction = Callable[[Rewards, Groups, Masked], Rewards]


def advantage_function(name: str, normalize_by_std: bool) -> AdvantageFunction:
    """Return the function that ``training.advantage`` names.

    Raises:
        ValueError: it is neither built in nor a function that can be loaded.
    """
    built_in: dict[str, AdvantageFunction] = {
        "group": partial(group_advantages, normalize_by_std=normalize_by_std),
        "leave-one-out": partial(leave_one_out_advantages, normalize_by_std=normalize_by_std),
        "batch": batch_advantages,
    }
    if name in built_in:
        return built_in[name]
    return partial(_own_advantages, name, load_extension("training.advantage", name))


def _own_advantages(
    name: str, function: Callable[..., Any], rewards_S: Rewards, groups_S: Groups, masked_S: Masked
) -> Rewards:
    found_S = np.asarray(function(rewards_S.copy(), groups_S.copy(), masked_S.copy()), np.float64)
    if found_S.shape != rewards_S.shape or not np.isfinite(found_S).all():
        raise ValueError(
            f'training.advantage = "{name}" gave {found_S.shape} values for {rewards_S.shape} rewards, or some that '
            "are not finite; give a finite advantage for each reward"
        )
    return np.where(masked_S, 0.0, found_S)


def group_advantages(
    rewards_S: Rewards, groups_S: Groups, masked_S: Masked, normalize_by_std: bool
) -> Rewards:
    """Advantage of each sample against its group: (r - mean) / (std + 1e-6), or r - mean.

    Mean and (population) deviation are those of the group's unmasked members. A member without a generated token
    has no loss, but its reward is real, so it counts in the baseline. Masked members, equal rewards and groups of
    one give exactly 0.
    """

    def against_mean(rewards: Rewards) -> Rewards:
        centred: Rewards = rewards - rewards.mean()
        return centred / (centred.std() + STD_EPSILON) if normalize_by_std else centred

    return _by_group(rewards_S, groups_S, masked_S, against_mean)


def leave_one_out_advantages(
    rewards_S: Rewards, groups_S: Groups, masked_S: Masked, normalize_by_std: bool
) -> Rewards:
    """r minus the mean of the others of its group (RLOO), which leaves the gradient's expectation as it is.

    With ``normalize_by_std`` divided by the group's deviation as ``group_advantages``.
    """

    def against_others(rewards: Rewards) -> Rewards:
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        against: Rewards = (rewards - others) / (rewards.std() + STD_EPSILON if normalize_by_std else 1.0)
        return against

    return _by_group(rewards_S, groups_S, masked_S, against_others)


def batch_advantages(rewards_S: Rewards, groups_S: Groups, masked_S: Masked) -> Rewards:
    """r minus its group's mean, divided by the deviation of all such differences of the batch (REINFORCE++).

    One scale for all prompts: a group that hardly differs is not blown up.
    """
    centred_S = group_advantages(rewards_S, groups_S, masked_S, normalize_by_std=False)
    if not centred_S.any():
        return centred_S
    scaled: Rewards = centred_S / (centred_S[~masked_S].std() + STD_EPSILON)
    return scaled


def _by_group(
    rewards_S: Rewards, groups_S: Groups, masked_S: Masked, advantages: Callable[[Rewards], Rewards]
) -> Rewards:
    found_S = np.zeros(len(rewards_S))
    for group in np.unique(groups_S[~masked_S]):
        members = np.flatnonzero((groups_S == group) & ~masked_S)
        rewards = rewards_S[members]
        scale = max(1.0, float(np.abs(rewards).max()))
        if float(np.ptp(rewards)) > SPREAD_LIMIT * scale:
            found_S[members] = advantages(rewards)
    return found_S


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
