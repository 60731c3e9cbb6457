"""A batch as classes: who is in which, their means, and how they move over steps."""

import pytest

from pearl.core.elastic.runtime_tracker import TrajectorySample
from pearl.core.elastic.trajectory_classes import averaged, classify
from pearl.types.trajectory import Turn


def sample(turns: int, seconds: float = 1.0, prefilled: int = 10) -> TrajectorySample:
    one = Turn(4, prefilled, 5, 3, env_seconds=0.5)
    return TrajectorySample((one,) * turns, generate_seconds=seconds)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 64, 128, 300])
def test_every_trajectory_is_in_one_class_and_the_slowest_are_last(count: int) -> None:
    found = classify([sample(turns=n, seconds=float(n)) for n in range(1, count + 1)])
    assert sum(one.share for one in found) == pytest.approx(1.0)
    assert sum(one.share * one.turns for one in found) == pytest.approx((count + 1) / 2)
    assert [one.turns for one in found] == sorted(one.turns for one in found)
    assert found[-1].share <= max(1 / count, 0.21)
    assert len(found) <= 5


def test_means_by_hand() -> None:
    (one,) = classify([sample(turns=3)])
    assert (one.share, one.turns, one.context_tokens) == (1.0, 3.0, 21.0)
    assert (one.input_tokens, one.input_tokens2, one.output_tokens, one.env_seconds) == (
        10.0,
        100.0,
        5.0,
        0.5,
    )


def test_no_trajectories_are_no_classes() -> None:
    assert classify([]) == ()


def test_classes_of_batches_alike_are_averaged_and_others_replace_them() -> None:
    few, more = classify([sample(turns=2)]), classify([sample(turns=6)])
    assert averaged(few, more, 0.25)[0].turns == pytest.approx(3.0)
    many = classify([sample(turns=1)] * 9)
    assert averaged(few, many, 0.25) == many
    assert averaged((), few, 0.25) == few
