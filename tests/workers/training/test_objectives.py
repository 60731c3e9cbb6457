"""Objectives, corrections, divergences and shares against formulas written out trajectory by trajectory."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_worlds import CONFIG, VOCABULARY, in_world, make_samples, trainer, with_training

from pearl.runtime.extensions import load_extension
from pearl.types.config import Config
from pearl.workers.training.advantages import advantage_function, batch_advantages, leave_one_out_advantages
from pearl.workers.training.aggregation import token_shares
from pearl.workers.training.fsdp import full_tensor
from pearl.workers.training.grpo import LossSettings, TokenBatch, token_losses
from pearl.workers.training.objectives import kl_estimates

LENGTHS = (3, 1, 5, 2)
ROWS = torch.tensor([row for row, length in enumerate(LENGTHS) for _ in range(length)])
ADVANTAGES = (1.5, -0.5, -1.0, 0.7)
LOW, HIGH, CAP = 0.2, 0.3, 1.6


def tokens(spread: float = 0.4) -> tuple[torch.Tensor, TokenBatch]:
    generator = torch.Generator().manual_seed(3)
    old, rollout, reference = (
        -2 + spread * torch.randn(len(ROWS), generator=generator, dtype=torch.float64) for _ in range(3)
    )
    logprobs = (
        old + spread * torch.randn(len(ROWS), generator=generator, dtype=torch.float64)
    ).requires_grad_()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[ROWS]
    return logprobs, TokenBatch(old, rollout, advantages, reference, ROWS)


Trajectory = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(log-probs, old ones, advantage) -> gain of each token."""


def clip(ratio: torch.Tensor) -> torch.Tensor:
    return torch.maximum(torch.minimum(ratio, torch.tensor(1 + HIGH)), torch.tensor(1 - LOW))


def ppo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio = torch.exp(new) / torch.exp(old)
    return torch.minimum(ratio * advantage, clip(ratio) * advantage)


def gspo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio = (torch.exp(new).prod() / torch.exp(old).prod()) ** (1 / len(new))
    return torch.minimum(ratio * advantage, clip(ratio) * advantage).expand(len(new))


def cispo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    return clip(torch.exp(new) / torch.exp(old)).detach() * advantage * new


def weight(level: str, kind: str, low: float, old: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    ratios = torch.exp(old) / torch.exp(rollout)
    if level == "sequence":
        ratios = ratios.prod().expand(len(old))
    if level == "geometric":
        ratios = (ratios.prod() ** (1 / len(old))).expand(len(old))
    if level == "none":
        return torch.ones(len(old))
    found = [float(ratio) for ratio in ratios]
    if kind == "mask":
        return torch.tensor([ratio if low <= ratio <= CAP else 0.0 for ratio in found])
    return torch.tensor([min(max(ratio, low), CAP) for ratio in found])


def settings(**changes: Any) -> LossSettings:
    return replace(LossSettings(LOW, HIGH, CAP, 0.0), **changes)


def check(found: torch.Tensor, expected: torch.Tensor, logprobs: torch.Tensor) -> None:
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    [ours], [theirs] = (
        torch.autograd.grad(loss, [logprobs], retain_graph=True) for loss in (found, expected)
    )
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("objective", "gain"), [("ppo", ppo), ("gspo", gspo), ("cispo", cispo)])
def test_objective_is_its_formula(objective: str, gain: Trajectory) -> None:
    logprobs, batch = tokens()
    found, sums = token_losses(logprobs, batch, settings(objective=objective, correction_level="none"))
    expected = torch.zeros((), dtype=torch.float64)
    for row, advantage in enumerate(ADVANTAGES):
        expected = expected - gain(logprobs[row == ROWS], batch.old_M[row == ROWS], advantage).sum()
    check(found, expected, logprobs)
    assert 0 < sums[2] < len(ROWS)  # some are clipped, and not all


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "none"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("low", [0.0, 0.7])
def test_correction_is_its_formula(level: str, kind: str, low: float) -> None:
    logprobs, batch = tokens()
    chosen = settings(correction_level=level, correction_kind=kind, correction_low=low)
    found, sums = token_losses(logprobs, batch, chosen)
    expected = torch.zeros((), dtype=torch.float64)
    total = 0.0
    for row, advantage in enumerate(ADVANTAGES):
        own = row == ROWS
        weights = weight(level, kind, low, batch.old_M[own], batch.rollout_M[own])
        total += float(weights.sum())
        expected = expected - (weights * ppo(logprobs[own], batch.old_M[own], advantage)).sum()
    check(found, expected, logprobs)
    assert sums[3].item() == pytest.approx(total, rel=1e-6)


def test_divergences_are_their_formulas() -> None:
    new, reference = torch.tensor([-1.0, -2.5], dtype=torch.float64), torch.tensor([-1.3, -2.0]).double()
    assert kl_estimates("k1", new, reference).tolist() == pytest.approx([0.3, -0.5])
    assert kl_estimates("k2", new, reference).tolist() == pytest.approx([0.045, 0.125])
    expected = [math.exp(-0.3) - 1 + 0.3, math.exp(0.5) - 1 - 0.5]
    assert kl_estimates("k3", new, reference).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_divergence_and_entropy_enter_the_loss(estimator: str) -> None:
    logprobs, batch = tokens()
    entropy = (logprobs.exp() * 3).square()
    plain, _ = token_losses(logprobs, batch, settings())
    chosen = settings(kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.2)
    found, _ = token_losses(logprobs, batch, chosen, entropy)
    assert batch.reference_M is not None
    kl = kl_estimates(estimator, logprobs, batch.reference_M)  # type: ignore[arg-type]
    check(found, plain + 0.3 * kl.sum() - 0.2 * entropy.sum(), logprobs)


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant", "prompt"])
def test_shares_are_the_mean_they_are_named_after(aggregation: Any) -> None:
    lengths, groups = [3, 0, 5, 2, 0], [7, 7, 7, 9, 8]
    losses = [np.array([1.0, 2.0, 6.0]), np.zeros(0), np.arange(5.0), np.array([4.0, -1.0]), np.zeros(0)]
    shares = token_shares(aggregation, lengths, groups, 10)
    found = sum(share * own.sum() for share, own in zip(shares, losses, strict=True))
    expected = {
        "token": (9.0 + 10.0 + 3.0) / 10,
        "trajectory": (9.0 / 3 + 10.0 / 5 + 3.0 / 2) / 3,
        "constant": (9.0 + 10.0 + 3.0) / (3 * 10),
        "prompt": ((9.0 + 10.0) / 8 + 3.0 / 2) / 2,
    }
    assert found == pytest.approx(expected[aggregation])


def test_advantages_against_the_others_of_a_group() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.5, 9.0, 4.0, 4.0, 2.0]), np.array([0, 0, 0, 0, 1, 1, 2])
    masked = np.array([False, False, False, True, False, False, False])
    found = leave_one_out_advantages(rewards, groups, masked, normalize_by_std=False)
    assert found.tolist() == pytest.approx([0.75, -0.75, 0.0, 0.0, 0.0, 0.0, 0.0])
    deviation = np.std([1.0, 0.0, 0.5])
    scaled = leave_one_out_advantages(rewards, groups, masked, normalize_by_std=True)
    assert scaled[0] == pytest.approx(0.75 / deviation, rel=1e-5)


def test_advantages_on_the_scale_of_the_batch() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.5, 0.6, 9.0]), np.array([0, 0, 1, 1, 1])
    found = batch_advantages(rewards, groups, np.array([False, False, False, False, True]))
    deviation = np.std([0.5, -0.5, -0.05, 0.05])
    assert found.tolist() == pytest.approx(np.array([0.5, -0.5, -0.05, 0.05, 0.0]) / deviation, rel=1e-4)
    assert batch_advantages(np.ones(3), np.zeros(3, np.int64), np.zeros(3, np.bool_)).tolist() == [0, 0, 0]


# functions of one's own


def own_advantages(rewards: Any, groups: Any, masked: Any) -> Any:
    return rewards * 2 + groups


def short_advantages(rewards: Any, groups: Any, masked: Any) -> Any:
    return rewards[1:]


def own_loss(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """REINFORCE."""
    return -batch.advantages_M * logprobs


def summed_loss(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return own_loss(logprobs, batch).sum()


def test_an_own_advantage_is_used_and_checked() -> None:
    given = np.array([1.0, 2.0]), np.array([3, 4]), np.array([False, True])
    assert advantage_function("test_objectives:own_advantages", True)(*given).tolist() == [5.0, 0.0]
    with pytest.raises(ValueError, match=r"gave \(1,\) values for \(2,\) rewards"):
        advantage_function("test_objectives:short_advantages", True)(*given)
    with pytest.raises(ValueError, match=r"training\.advantage"):
        advantage_function("test_objectives:nothing", True)


def test_an_own_loss_is_used_and_checked() -> None:
    logprobs, batch = tokens()
    found, _ = token_losses(logprobs, batch, settings(own=own_loss, own_name="mine:loss"))
    check(found, -(batch.advantages_M * logprobs).sum(), logprobs)
    with pytest.raises(ValueError, match=r'training.loss = "mine:loss" gave \(\) for 11 tokens'):
        token_losses(logprobs, batch, settings(own=summed_loss, own_name="mine:loss"))


def test_gradients_follow_the_example_of_an_own_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3] / "examples")
    rewards, groups = np.array([1.0, 0.25, 0.5, 3.0, 7.0]), np.array([4, 4, 9, 9, 9])
    advantages = advantage_function("own_objective:against_the_best", True)
    found = advantages(rewards, groups, np.array([False, False, False, False, True]))
    assert found.tolist() == [0.0, -0.75, -2.5, 0.0, 0.0]
    logprobs, batch = tokens()
    own = load_extension("training.loss", "own_objective:reinforce")
    total, _ = token_losses(logprobs, batch, settings(own=own, own_name="own_objective:reinforce"))
    (gradient,) = torch.autograd.grad(total, [logprobs])
    assert torch.equal(gradient, -batch.advantages_M), "each token's, and nothing of the built-in objective"


# however it is cut

CHOICES: tuple[dict[str, Any], ...] = (
    {"objective": "gspo", "loss_aggregation": "trajectory", "correction_level": "geometric"},
    {"objective": "cispo", "loss_aggregation": "prompt", "correction_kind": "mask", "advantage": "batch"},
    {"loss_aggregation": "constant", "correction_level": "sequence", "entropy_coefficient": 0.1},
    {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1", "advantage": "leave-one-out"},
    {"loss": "test_objectives:own_loss", "advantage": "test_objectives:own_advantages"},
)


def gradients(config: Config, root: Path) -> dict[str, torch.Tensor]:
    """Of the second step, which the reference differs from, taken from the update of Adam's first moment."""
    own = trainer(config, root)
    own.begin(0, ())
    moments = []
    for step in range(2):
        result = own.train(step, make_samples(12, seed=step))
        assert result.metrics["updates"] == 1
        state, named = own._optimizer.state, own.policy.parameters
        moments.append({name: full_tensor(state[named[name]]["exp_avg"]).clone() for name in named})
    beta = config.training.betas[0]
    return {name: (moments[1][name] - beta * moments[0][name]) / (1 - beta) for name in moments[0]}


def all_gradients(configs: list[Config], root: Path) -> list[dict[str, torch.Tensor]]:
    return [gradients(config, root) for config in configs]


def test_no_choice_depends_on_the_cut(tmp_path: Path) -> None:
    assert VOCABULARY == 16
    whole = [with_training(CONFIG, **changes) for changes in CHOICES]
    [expected] = in_world(1, all_gradients, whole, tmp_path)
    cut = [with_training(config, tokens_per_micro_batch=64) for config in whole]
    for found in in_world(3, all_gradients, cut, tmp_path):
        for one, other in zip(found, expected, strict=True):
            for name, gradient in other.items():
                assert (one[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    first, *others = (next(iter(found.values())) for found in expected)
    assert not any(torch.allclose(first, other, rtol=1e-3) for other in others)


def references(config: Config, root: Path) -> list[float]:
    own = trainer(config, root)
    own.begin(0, ())
    return [own.train(step, make_samples(8, seed=step)).metrics["kl"] for step in range(4)]


def test_the_reference_is_reset(tmp_path: Path) -> None:
    config = with_training(kl_coefficient=0.01, learning_rate=1e-2, reference_reset_every=2)
    [[first, second, third, fourth]] = in_world(1, references, config, tmp_path)
    assert first == third == 0.0  # the weights themselves
    assert second > 0
    assert fourth > 0
