import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pearl.types.messages.environment import MAX_REWARD
from pearl.workers.training.advantages import group_advantages, shuffle_in_groups
from pearl.workers.training.grpo import STATISTICS, LossSettings, TokenBatch, token_losses
from pearl.workers.training.scoring import score_logits

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, tis_cap=2.0, kl_coefficient=0.0)


def advantages(
    rewards: list[float], masked: list[bool] | None = None, by_std: bool = True
) -> npt.NDArray[np.float64]:
    count = len(rewards)
    flags = np.array(masked if masked is not None else [False] * count)
    return group_advantages(np.array(rewards), np.zeros(count, np.int64), flags, by_std)


@pytest.mark.parametrize("reward", [0.35, 0.1, 1 / 3, 1e6 / 7, -0.7])
@pytest.mark.parametrize("count", [1, 7, 8])
@pytest.mark.scenario("GR-01")
def test_equal_rewards_give_exactly_zero(reward: float, count: int) -> None:
    assert advantages([reward] * count).tolist() == [0.0] * count


@pytest.mark.scenario("GR-01")
def test_unequal_rewards_are_bounded() -> None:
    found = advantages([0.35] * 7 + [-0.25])
    # mean 0.275, population deviation 0.6 * sqrt(7) / 8 = 0.198431
    assert found[0] == pytest.approx(0.075 / 0.198432, rel=1e-5)
    assert found[7] == pytest.approx(-0.525 / 0.198432, rel=1e-5)


@pytest.mark.scenario("GR-01")
def test_rewards_a_billionth_apart_are_equal() -> None:
    assert advantages([0.5, 0.5 + 1e-9, 0.5 - 1e-9]).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.scenario("GR-01")
def test_a_small_real_spread_is_bounded_by_the_group_size() -> None:
    found = advantages([0.5] * 15 + [0.5001])
    assert np.abs(found).max() <= math.sqrt(15)
    assert found[15] > 1


def test_advantage_without_the_deviation() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0], by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_groups_do_not_mix() -> None:
    rewards = np.array([1.0, 5.0, 0.0, 7.0])
    found = group_advantages(rewards, np.array([3, 9, 3, 9]), np.zeros(4, np.bool_), False)
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]


@pytest.mark.scenario("EN-05")
def test_infrastructure_failure_is_out_of_the_baseline() -> None:
    found = advantages([1.0, 0.0, 1.0, 0.0], [False, False, False, True], by_std=False)
    assert found == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0.0])


@pytest.mark.scenario("EN-05")
def test_a_group_of_failures_has_no_advantage() -> None:
    assert advantages([0.0, 1.0, 0.0, 0.0], [True] * 4).tolist() == [0.0] * 4


def test_shuffling_permutes_within_groups_and_repeats() -> None:
    groups = np.repeat([0, 1], 8)
    masked = np.zeros(16, np.bool_)
    masked[3] = True
    original = np.arange(16.0)
    original[3] = 0.0
    first = shuffle_in_groups(original, groups, masked, seed=5, step=2)
    assert first.tolist() == shuffle_in_groups(original, groups, masked, seed=5, step=2).tolist()
    assert first.tolist() != shuffle_in_groups(original, groups, masked, seed=5, step=3).tolist()
    assert first.tolist() != original.tolist()
    assert first[3] == 0.0
    for group in (0, 1):
        assert sorted(first[groups == group]) == sorted(original[groups == group])


def batch(old: list[float], rollout: list[float], advantage: list[float]) -> TokenBatch:
    return TokenBatch(torch.tensor(old), torch.tensor(rollout), torch.tensor(advantage), None)


def test_loss_by_hand() -> None:
    # ratios 1, 1.5 (clipped at 1.28), 0.5 with a negative advantage (clipped at 0.8), 1.5 with a negative one (not)
    logprobs = torch.log(torch.tensor([0.4, 0.3, 0.1, 0.3])).requires_grad_()
    old = [math.log(0.4), math.log(0.2), math.log(0.2), math.log(0.2)]
    # weights 0.4 / 0.2 = 2 at the cap, 0.2 / 0.1 = 2, 0.2 / 0.4 = 0.5, 0.2 / 0.02 = 10 -> 2
    rollout = [math.log(0.2), math.log(0.1), math.log(0.4), math.log(0.02)]
    total, sums = token_losses(logprobs, batch(old, rollout, [1.0, 2.0, -1.0, -1.0]), SETTINGS)
    terms = [-2.0 * 1.0, -2.0 * 1.28 * 2.0, 0.5 * 0.8, 2.0 * 1.5]
    assert total.item() == pytest.approx(sum(terms), rel=1e-6)
    total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    # d(-w q A) / d log pi = -w q A where it is not clipped
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, 3.0], rel=1e-6)
    named = dict(zip(STATISTICS, sums.tolist(), strict=True))
    assert named["clip_ratio"] == 2
    assert named["tis_mean"] == pytest.approx(6.5, rel=1e-6)
    assert named["tis_capped_ratio"] == 1
    assert named["ratio_mean"] == pytest.approx(4.5, rel=1e-6)


def test_kl_by_hand() -> None:
    logprobs = torch.log(torch.tensor([0.5])).requires_grad_()
    tokens = TokenBatch(logprobs.detach(), logprobs.detach(), torch.zeros(1), torch.log(torch.tensor([0.25])))
    total, _ = token_losses(logprobs, tokens, LossSettings(0.2, 0.28, 2.0, 0.1))
    assert total.item() == pytest.approx(0.1 * (0.5 - math.log(0.5) - 1), rel=1e-5)
    total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - 0.5), rel=1e-5)


@pytest.mark.scenario("LP-02")
def test_extreme_log_probs_keep_loss_and_gradient_finite() -> None:
    logprobs = torch.tensor([-200.0, 0.0, -1e-7]).requires_grad_()
    total, sums = token_losses(
        logprobs, batch([0.0, -200.0, 0.0], [-300.0, 0.0, 0.0], [1.0, -1.0, 1.0]), SETTINGS
    )
    total.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(total.item())
    assert torch.isfinite(sums).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.scenario("LP-01")
def test_scores_are_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    scores = score_logits(logits, torch.tensor([1]), temperature=0.7)
    weights = [math.exp(x / 0.7) for x in (2.0, 0.0, -1.0)]
    assert scores.logprobs_M.item() == pytest.approx(math.log(weights[1] / sum(weights)), rel=1e-6)
    shares = [weight / sum(weights) for weight in weights]
    assert scores.entropy_M.item() == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-5)
    greedy = score_logits(logits, torch.tensor([1]), temperature=0.0)
    assert greedy.logprobs_M.item() == logits.log_softmax(-1)[0, 1].item()


def test_the_largest_rewards_have_finite_advantages() -> None:
    rewards = np.array([MAX_REWARD, -MAX_REWARD, 0.0, MAX_REWARD])
    for by_std in (True, False):
        found = group_advantages(rewards, np.zeros(4, np.int64), np.zeros(4, np.bool_), by_std)
        assert np.isfinite(found.astype(np.float32) ** 2).all()
        assert found[0] > 0 > found[1]
