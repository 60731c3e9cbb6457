"""Eqs. 1-3 against hand calculations."""

import pytest
from sample_profiles import HAND

from pearl.core.elastic import makespan
from pearl.core.elastic.capacity import allocations, is_feasible
from pearl.types.plan import Allocation


def test_eq_1_colocated() -> None:
    # 10 turns * (8 * 100 / 2 * 1 ms + 20 * (10 ms + 5 ms * 8 / 2) + 0.3 s) + 7 s
    assert makespan.colocated_prefill_seconds(HAND, 2) == pytest.approx(4.0)
    assert makespan.colocated_decode_seconds(HAND, 2) == pytest.approx(6.0)
    assert makespan.overhead_seconds(HAND) == pytest.approx(3.0)
    prediction = makespan.closed_form(HAND, Allocation(colocated=2))
    assert prediction.seconds == pytest.approx(20.0)
    assert prediction.terms.transfer == 0.0


def test_eq_2_decode_path() -> None:
    # 10 * 20 * (10 ms + 5 ms * 8 / (2 * 2)) * 2
    assert makespan.decode_seconds(HAND, 2) == pytest.approx(8.0)


def test_eq_3_prefill_path() -> None:
    # 10 * (8 * 100 / 4 * 1 ms + 8 * 100 * 10 B / 20 kB/s)
    assert makespan.prefill_seconds(HAND, 4) == pytest.approx(2.0)
    assert makespan.transfer_seconds(HAND) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("allocation", "seconds"),
    [
        (Allocation(prefill=4, decode=2), 8.0 + 7.0),  # decode is longer than 2 + 4
        (Allocation(prefill=1, decode=2), 8.0 + 4.0 + 7.0),  # prefill and transfer are longer than 8
    ],
)
def test_disaggregated_is_the_longer_path_and_the_environment(allocation: Allocation, seconds: float) -> None:
    assert makespan.closed_form(HAND, allocation).seconds == pytest.approx(seconds)


def test_every_allocation_of_a_budget() -> None:
    assert [str(allocation) for allocation in allocations(4)] == ["4C", "1P3D", "2P2D", "3P1D"]
    assert [str(allocation) for allocation in allocations(1)] == ["1C"]
    assert list(allocations(0)) == []


def test_decode_workers_must_hold_the_whole_batch() -> None:
    # 8 trajectories of 1000 B in workers of 4000 B: two decode workers hold them exactly
    assert is_feasible(HAND, Allocation(prefill=1, decode=2))
    assert not is_feasible(HAND, Allocation(prefill=2, decode=1))
    assert is_feasible(HAND, Allocation(colocated=1))
