"""Cohorts by themselves: which members they have, when they may be opened, and evaluation rounds."""

from typing import Any

import msgspec
import pytest

from pearl.core.pipeline.buffer import CohortBuffer
from pearl.core.pipeline.evaluation import EvaluationRound, task_of
from pearl.types.config import Config, DataConfig, RolloutConfig, RunConfig


def buffer(total_prompts: int = 0, num_steps: int = 4, **rollout: Any) -> CohortBuffer:
    """Two prompts a step, three trajectories each."""
    config = Config(
        run=RunConfig(num_steps=num_steps),
        data=DataConfig(batch_size=6, group_size=3),
        rollout=RolloutConfig(**{"staleness_bound": 1, **rollout}),
    )
    return CohortBuffer.build(config, total_prompts)


def open_all(cohorts: CohortBuffer, step: int) -> list[int]:
    """Open every member that may be opened while the trainer is at ``step``; their cohorts in order."""
    opened = []
    while (cohort := cohorts.next_to_open(step)) is not None:
        cohorts.open_next(cohort)
        opened.append(cohort.index)
    return opened


def test_members_are_opened_prompt_by_prompt() -> None:
    cohorts = buffer()
    first = cohorts.get(0)
    assert [cohorts.open_next(first) for _ in range(6)] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert cohorts.members(cohorts.get(1)) == [6, 7, 8, 9, 10, 11]
    assert cohorts.prompts(cohorts.get(1)) == [2, 3]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_cohort_is_opened_beyond_the_staleness_bound(bound: int) -> None:
    opened = open_all(buffer(num_steps=10, staleness_bound=bound), 2)
    assert opened == [index for index in range(2, 3 + bound) for _ in range(6)]


def test_a_strict_start_waits_until_the_cohort_before_is_complete() -> None:
    cohorts = buffer(start="strict")
    assert open_all(cohorts, 0) == [0] * 6
    cohorts.get(0).finished = 5
    assert open_all(cohorts, 0) == []
    cohorts.get(0).finished = 6
    assert open_all(cohorts, 0) == [1] * 6


def test_no_cohort_is_opened_beyond_the_last_step() -> None:
    assert set(open_all(buffer(num_steps=2), 1)) == {1}


def test_the_data_ends_the_run_and_its_last_cohort_may_be_short() -> None:
    cohorts = buffer(total_prompts=3)
    assert cohorts.num_steps == 2
    assert [cohorts.get(index).num_members for index in range(2)] == [6, 3]


def test_dropped_cohorts_are_forgotten_on_the_side_that_was_named() -> None:
    cohorts = buffer()
    for index in range(4):
        cohorts.get(index)
    cohorts.drop_before(1)
    assert sorted(cohorts.cohorts) == [1, 2, 3]
    cohorts.drop_from(3)
    assert sorted(cohorts.cohorts) == [1, 2]


def test_a_buffer_comes_back_from_a_snapshot_as_it_was() -> None:
    cohorts = buffer()
    open_all(cohorts, 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cohorts), type=CohortBuffer) == cohorts


def test_rounds_of_evaluation_have_trajectories_of_their_own() -> None:
    first, second = EvaluationRound(0, 0, 3), EvaluationRound(1, 5, 3)
    opened = [[one.open_next() for _ in range(3)] for one in (first, second)]
    assert len({identity for numbers in opened for identity in numbers}) == 6
    assert [[task_of(identity) for identity in numbers] for numbers in opened] == [[0, 1, 2]] * 2


def test_masked_tasks_are_left_out_of_the_mean_reward() -> None:
    one = EvaluationRound(0, 0, 4, finished=3, masked=1, reward_sum=1.5)
    assert one.reward_mean == 0.75
    assert not one.is_complete
    one.finished = 4
    assert one.is_complete


def test_a_round_whose_tasks_are_all_masked_has_no_reward() -> None:
    assert EvaluationRound(0, 0, 2, finished=2, masked=2).reward_mean == 0.0
