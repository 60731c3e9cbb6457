"""An advantage and a loss of one's own: REINFORCE, with the best of each group as its baseline.

cd examples && pearl run own_environment.toml training.advantage=own_objective:against_the_best \
    training.loss=own_objective:reinforce
"""

import numpy as np
import torch

from pearl.workers.training.grpo import TokenBatch


def against_the_best(rewards: np.ndarray, groups: np.ndarray, masked: np.ndarray) -> np.ndarray:
    counted = np.where(masked, -np.inf, rewards)
    best = {group: counted[groups == group].max() for group in np.unique(groups)}
    return np.where(masked, 0.0, rewards - [max(best[group], -1e9) for group in groups])


def reinforce(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return -batch.advantages_M * logprobs
