"""Sums of a training step, gathered over ranks once at its end, and the metrics made of them."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from pearl.workers.training.grpo import STATISTICS
from pearl.workers.training.samples import TrainingSample
from pearl.workers.training.scoring import Scores

GAPS = ("gap_sum", "gap_count")


class StepMetrics:
    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(STATISTICS) + 2 + len(GAPS), dtype=torch.float64, device=device)
        self._max_gap = torch.zeros(1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add_losses(self, statistics: torch.Tensor, loss: torch.Tensor, scores: Scores) -> None:
        """Add the losses of one micro-batch; ``loss`` is already divided by its update's tokens."""
        own = torch.stack((scores.entropy_M.sum(dtype=torch.float64), loss.detach().double()))
        self._sums[: len(STATISTICS)] += statistics
        self._sums[len(STATISTICS) : len(STATISTICS) + 2] += own

    @torch.no_grad()
    def add_gap(self, old_M: torch.Tensor, rollout_M: torch.Tensor, current_M: torch.Tensor) -> None:
        """|rollout - training| over the tokens made wholly under the weights being trained."""
        gap = (old_M - rollout_M).abs().double()[current_M]
        if len(gap):
            self._sums[-2] += gap.sum()
            self._sums[-1] += len(gap)
            self._max_gap = torch.maximum(self._max_gap, gap.max())

    def reduce(self) -> "Sums":
        """A collective."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._max_gap, dist.ReduceOp.MAX)
        return Sums(self._sums.tolist(), self._max_gap.item())


class Sums:
    """Of the whole batch, the same on every rank."""

    def __init__(self, values: list[float], max_gap: float) -> None:
        self._statistics = dict(zip(STATISTICS, values, strict=False))
        self.entropy, self.loss, self._gap_sum, gap_count = values[len(STATISTICS) :]
        self.gap_tokens = int(gap_count)
        self.max_gap = max_gap if math.isfinite(max_gap) else 0.0

    def means(self, num_tokens: int, num_updates: int) -> dict[str, float]:
        tokens = max(1, num_tokens)
        return {
            "loss": self.loss / max(1, num_updates),
            "entropy": self.entropy / tokens,
            **{name: value / tokens for name, value in self._statistics.items()},
            "logprob_gap_mean": self._gap_sum / max(1, self.gap_tokens),
        }


def sample_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return what the batch is made of, whoever trains it."""
    rewards = np.array([sample.reward for sample in samples if not sample.masked])
    return {
        "tokens_trained": float(sum(sample.num_trained for sample in samples)),
        "samples_trained": float(sum(sample.is_run for sample in samples)),
        "samples_masked": float(sum(sample.masked for sample in samples)),
        "samples_invalid": float(sum(sample.invalid for sample in samples)),
        "samples_empty": float(sum(not sample.masked and not sample.is_run for sample in samples)),
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "reward_min": float(rewards.min()) if len(rewards) else 0.0,
        "reward_max": float(rewards.max()) if len(rewards) else 0.0,
    }


def finite_only(metrics: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Strict JSON knows no NaN: a value that is not a finite number is left out."""
    return {name: float(value) for name, value in metrics if math.isfinite(value)}
