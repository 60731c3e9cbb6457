"""The survival-fluid model: hand calculations, and a simulation that shares no formula with it."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from request_simulation import simulate
from sample_profiles import HAND, shipped

from pearl.core.elastic.capacity import allocations, is_feasible
from pearl.core.elastic.makespan import Model, closed_form
from pearl.core.elastic.survival_fluid import Station, survival_fluid, turn_seconds
from pearl.types.plan import Allocation
from pearl.types.profile import Profile


def lone(profile: Profile = HAND) -> Profile:
    return Profile(msgspec.structs.replace(profile.workload, batch_size=1.0), profile.platform)


def test_one_trajectory_meets_nobody() -> None:
    # 10 turns of 100 * 1 ms + 20 * 15 ms, then 10 * 0.3 s and 7 s
    colocated = survival_fluid(lone(), Allocation(colocated=3))
    assert colocated.seconds == pytest.approx(1.0 + 3.0 + 3.0 + 7.0)
    # and 10 * 100 * 10 B / 20 kB/s instead of the overhead
    split = survival_fluid(lone(), Allocation(prefill=1, decode=1))
    assert split.seconds == pytest.approx(1.0 + 3.0 + 0.5 + 7.0)
    assert split.terms.transfer == pytest.approx(0.5)


def test_two_at_one_station_by_hand() -> None:
    # C = 1 + C / (C - 1) has the root (3 + sqrt 5) / 2
    (seconds,) = turn_seconds([Station(1.0, 1.0)], delay_s=1.0, live=2.0)
    assert seconds == pytest.approx((3 + math.sqrt(5)) / 2 - 1)


def test_a_station_that_limits_sets_the_pace() -> None:
    # 100 trajectories, each a second of the only server: nearly all of them wait there
    (seconds,) = turn_seconds([Station(1.0, 1.0)], delay_s=5.0, live=100.0)
    assert seconds == pytest.approx(95.0, rel=0.02)


def test_the_terms_add_up() -> None:
    for allocation in allocations(6):
        prediction = survival_fluid(HAND, allocation)
        assert prediction.seconds == pytest.approx(sum(msgspec.structs.astuple(prediction.terms)))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(1.0, 1e3), st.floats(0.0, 1e3), st.lists(st.floats(0.1, 1e3), min_size=3, max_size=3))
def test_the_cycle_is_consistent(live: float, delay_s: float, demands: list[float]) -> None:
    """Little's law at every station, for anything between idle and saturated."""
    stations = [Station(demand, demand / 2) for demand in demands]
    seconds = turn_seconds(stations, delay_s, live)
    cycle = delay_s + sum(seconds)
    for station, at_station in zip(stations, seconds, strict=True):
        stretched = 1 - (live - 1) / cycle * station.stretch
        assert at_station * stretched == pytest.approx(station.own_seconds, rel=1e-3)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 30))
def test_more_workers_are_never_slower(num_workers: int) -> None:
    less, more = (
        survival_fluid(HAND, Allocation(colocated=n)).seconds for n in (num_workers, num_workers + 1)
    )
    assert more <= less * (1 + 1e-6)


def small(name: str, *overrides: str) -> Profile:
    few = ("workload.num_turns=12", "workload.mean_turns=6.5", "platform.overhead_seconds=0")
    return shipped(name, *few, "workload.env_seconds=15", *overrides)


JOBS = [
    small("qwen3-8b"),
    small("qwen3-30b-a3b", "workload.batch_size=32", "workload.env_seconds=60"),
    small("qwen3-30b-a3b", "workload.turn_output_tokens=900"),
]


@pytest.mark.parametrize("profile", JOBS, ids=["8b", "30b", "30b-long-answers"])
def test_predictions_are_near_a_simulation_and_choose_better_than_the_closed_form(profile: Profile) -> None:
    for num_workers in (4, 8):
        feasible = [a for a in allocations(num_workers) if is_feasible(profile, a)]
        measured = {a: sum(simulate(profile, a, seed) for seed in range(2)) / 2 for a in feasible}
        for allocation, seconds in measured.items():
            assert survival_fluid(profile, allocation).seconds == pytest.approx(seconds, rel=0.15), allocation
        least = min(measured.values())
        assert regret(profile, survival_fluid, measured) <= 1.02 * least
        assert regret(profile, survival_fluid, measured) <= regret(profile, closed_form, measured)


def regret(profile: Profile, model: Model, measured: dict[Allocation, float]) -> float:
    """Measured seconds of the model's choice."""
    return measured[min(measured, key=lambda allocation: model(profile, allocation).seconds)]
