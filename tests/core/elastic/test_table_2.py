"""The paper's Table 2 and Fig. 2(c), from the profiles that ship."""

import pytest
from sample_profiles import shipped

from pearl.core.elastic.candidate_search import Candidate
from pearl.core.elastic.decision_engine import Decision, decide
from pearl.types.config import ElasticConfig
from pearl.types.plan import Allocation

ADAPTIVE = ElasticConfig(pd="adaptive", makespan="closed-form")


@pytest.mark.parametrize(
    ("num_workers", "selected"),
    [(5, "2P3D"), (6, "3P3D"), (8, "3P5D"), (13, "4P9D"), (14, "4P10D"), (16, "4P12D"), (2, "2C"), (1, "1C")],
)
def test_table_2_selected_allocations(num_workers: int, selected: str) -> None:
    assert str(decide(shipped("qwen3-8b"), num_workers, None, ADAPTIVE).target) == selected


def test_two_workers_are_forced_to_colocate() -> None:
    decision = decide(shipped("qwen3-8b"), 2, Allocation(prefill=1, decode=1), ADAPTIVE)
    assert (str(decision.target), decision.switch, decision.forced) == ("2C", "mode", True)
    assert [candidate.feasible for candidate in decision.candidates] == [True, False]


def fig_2c(batch_size: int) -> Decision:
    return decide(shipped("qwen3-30b-a3b", f"workload.batch_size={batch_size}"), 8, None, ADAPTIVE)


def best_split(decision: Decision) -> Candidate:
    splits = [c for c in decision.candidates if c.feasible and not c.allocation.is_colocated]
    return min(splits, key=lambda candidate: candidate.seconds)


@pytest.mark.parametrize(("batch_size", "best"), [(48, "4P4D"), (64, "5P3D")])
def test_fig_2c_best_ratio(batch_size: int, best: str) -> None:
    assert str(best_split(fig_2c(batch_size)).allocation) == best


@pytest.mark.parametrize(("batch_size", "percent"), [(32, 9.7), (80, 1.4), (96, -6.1)])
def test_fig_2c_gain_within_two_points(batch_size: int, percent: float) -> None:
    decision = fig_2c(batch_size)
    gain = decision.candidates[0].seconds / best_split(decision).seconds - 1
    assert 100 * gain == pytest.approx(percent, abs=2.0)


@pytest.mark.parametrize(("batch_size", "is_colocated"), [(32, 0), (48, 0), (64, 0), (80, 0), (96, 1)])
def test_fig_2c_chosen_mode(batch_size: int, is_colocated: bool) -> None:
    assert fig_2c(batch_size).target.is_colocated == bool(is_colocated)
