"""The literal tables of a trajectory's phases and of lending: what may follow what, and nothing else."""

from itertools import product
from typing import get_args

import pytest

from pearl.core.elastic import toggle_manager
from pearl.core.elastic.toggle_manager import TogglePhase, ToggleState
from pearl.core.pipeline import trajectory
from pearl.core.pipeline.trajectory import Phase, Trajectory
from pearl.types.ids import PromptId, TrajectoryId
from pearl.types.trajectory import Turn


def make(phase: Phase) -> Trajectory:
    return Trajectory(TrajectoryId(3), PromptId(1), 0, 0, phase=phase)


@pytest.mark.parametrize(("before", "after"), list(product(get_args(Phase), repeat=2)))
def test_a_trajectory_enters_the_phases_of_its_table_only(before: Phase, after: Phase) -> None:
    one = make(before)
    if (before, after) in trajectory.TRANSITIONS:
        one.enter(after)
        assert one.phase == after
    else:
        with pytest.raises(AssertionError, match=f"trajectory 3: {before} -> {after} is no move"):
            one.enter(after)
        assert one.phase == before


@pytest.mark.parametrize(("before", "after"), list(product(get_args(TogglePhase), repeat=2)))
def test_lending_enters_the_phases_of_its_table_only(before: TogglePhase, after: TogglePhase) -> None:
    state = ToggleState(phase=before)
    if (before, after) in toggle_manager.TRANSITIONS:
        state.enter(after)
        assert state.phase == after
    else:
        with pytest.raises(AssertionError, match=f"training GPUs: {before} -> {after} is no move"):
            state.enter(after)


def test_what_is_trained_is_only_ever_finished_again() -> None:
    assert {after for before, after in trajectory.TRANSITIONS if before == "trained"} == {"finished"}


def test_gpus_are_lent_only_after_the_training_state_has_left_them() -> None:
    assert {before for before, after in toggle_manager.TRANSITIONS if after == "lent"} == {"offloading"}


def test_tokens_are_forgotten_and_failures_and_phase_are_not() -> None:
    one = make("stepping")
    one.turns, one.tokens, one.failures, one.losses, one.reward = [Turn(5)], 9, 2, 1, 1.0
    one.reset_tokens()
    expected = make("stepping")
    expected.failures, expected.losses = 2, 1
    assert one == expected
