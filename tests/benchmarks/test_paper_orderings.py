"""The paper's orderings with smaller batches and a fixed seed; at full size they are judged by launch/reproduce.sh."""

import pytest

from benchmarks.paper.runner import Outcome, Run, fixed, perform

SMALLER = (
    "data.batch_size=32",
    "data.group_size=8",
    "rollout.max_context_tokens=16384",
    "rollout.max_new_tokens_per_turn=8192",
)


def under_trace(policy: str) -> float:
    run = Run(policy=policy, segment=2, overrides=SMALLER, horizon_s=2700.0)
    return perform(run.job()).result.throughput_tokens_per_s


def with_pool(policy: str, workers: int, steps: int, *overrides: str) -> Outcome:
    return perform(fixed(policy, workers, steps, *SMALLER, *overrides).job())


def last_step_s(outcome: Outcome) -> float:
    return outcome.result.per_step[-1].seconds


@pytest.mark.timeout(120)
def test_elastic_policies_are_in_the_paper_s_order() -> None:
    """The more of the GPUs a policy can use, the higher its throughput."""
    found = {policy: under_trace(policy) for policy in ("pearl", "roll-large", "rlboost+", "roll")}
    assert found["pearl"] > max(found["roll-large"], found["rlboost+"])
    assert found["roll"] < min(found["roll-large"], found["rlboost+"])


@pytest.mark.timeout(120)
def test_with_four_gpus_a_forced_split_loses_where_one_worker_cannot_keep_the_prefixes() -> None:
    settings = ("data.batch_size=96",)
    seconds = {
        policy: sum(
            perform(fixed(policy, 2, 1, *settings, *pd, seed=seed).job()).first_rollout_seconds
            for seed in range(2)
        )
        for policy, pd in (("a", ("elastic.pd=1P1D",)), ("roll", ()))
    }
    assert seconds["a"] > 1.05 * seconds["roll"]


@pytest.mark.timeout(120)
def test_borrowing_wins_most_with_four_gpus() -> None:
    gains = {
        workers: last_step_s(with_pool("roll", workers, 2)) / last_step_s(with_pool("a+b", workers, 2))
        for workers in (2, 8)
    }
    assert gains[2] > max(1.1, gains[8])
