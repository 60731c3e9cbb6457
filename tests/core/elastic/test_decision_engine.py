"""Choices: the least makespan, reluctant switches, forced ones, fixed policies."""

import math

import msgspec
import pytest
from calls import num_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_profiles import HAND, shipped

from pearl.core.elastic.candidate_search import Lending
from pearl.core.elastic.decision_engine import Decision, SwitchCost, decide, switch_between
from pearl.core.elastic.makespan import closed_form
from pearl.types.config import ElasticConfig
from pearl.types.plan import Allocation
from pearl.types.profile import Platform, Profile, TrajectoryClass, Workload

ADAPTIVE = ElasticConfig(pd="adaptive", makespan="closed-form")
QWEN3_8B = shipped("qwen3-8b")


def now(text: str) -> Allocation:
    return Allocation.parse(text)


def choose(current: str | None, num_workers: int, profile: Profile = QWEN3_8B) -> Decision:
    return decide(profile, num_workers, None if current is None else now(current), ADAPTIVE)


def with_overhead(seconds: float) -> Profile:
    platform = msgspec.structs.replace(QWEN3_8B.platform, overhead_seconds=seconds)
    return Profile(QWEN3_8B.workload, platform)


# the choice


def test_all_candidates_are_there_and_the_least_feasible_is_chosen() -> None:
    decision = choose(None, 8)
    assert [str(c.allocation) for c in decision.candidates] == ["8C"] + [f"{p}P{8 - p}D" for p in range(1, 8)]
    assert decision.seconds == min(c.seconds for c in decision.candidates if c.feasible)
    assert (decision.switch, decision.forced) == ("first", False)
    assert "3P5D" in decision.reason


def test_no_workers_is_a_decision_too() -> None:
    decision = decide(HAND, 0, Allocation(colocated=3), ADAPTIVE)
    assert (decision.target, decision.seconds, decision.candidates) == (Allocation(), None, ())


# reluctance


def test_a_small_gain_of_ratio_does_not_switch() -> None:
    decision = choose("5P8D", 13)
    assert (str(decision.target), decision.switch) == ("5P8D", "none")
    assert "4P9D" in decision.reason
    assert "not above 5%" in decision.reason


def test_a_large_gain_of_ratio_switches() -> None:
    assert (str(choose("6P2D", 8).target), choose("5P3D", 8).switch) == ("3P5D", "ratio")


def test_a_change_of_mode_needs_more_than_one_of_ratio() -> None:
    # 3P5D takes 632 s; colocated 676 s is 6.5 % more, which would do for a ratio
    assert str(choose("8C", 8).target) == "8C"
    # with twice the overhead of colocation it gains 20 %
    assert str(choose("8C", 8, with_overhead(2.8)).target) == "3P5D"
    # and without overhead colocation is 11 % less than 3P5D
    decision = choose("3P5D", 8, with_overhead(0.0))
    assert (str(decision.target), decision.switch, decision.forced) == ("8C", "mode", False)


def test_an_optional_switch_must_earn_its_cost() -> None:
    current = now("5P3D")  # 705 s against 632 s
    dear, cheap = SwitchCost(seconds=80.0), SwitchCost(seconds=80.0, num_steps=2)
    stays = decide(QWEN3_8B, 8, current, ADAPTIVE, dear)
    assert stays.target == current
    assert "the switch costs 80 s" in stays.reason
    assert str(decide(QWEN3_8B, 8, current, ADAPTIVE, cheap).target) == "3P5D"


def test_an_unearned_mode_switch_leaves_the_ratio_switch_open() -> None:
    profile = with_overhead(0.0)
    strict = msgspec.structs.replace(ADAPTIVE, mode_threshold=0.5)
    assert str(decide(profile, 8, now("6P2D"), strict).target) == "3P5D"


# workers come and go


def test_joiners_take_the_best_roles_without_moving_anybody() -> None:
    decision = choose("3P5D", 13)
    assert (str(decision.target), decision.switch) == ("4P9D", "resize")


def test_growing_from_a_poor_split_is_not_a_reason_to_move_survivors() -> None:
    # 5P3D + 5 joiners: 5P8D is within 5 % of 4P9D
    assert str(choose("5P3D", 13).target) == "5P8D"


def test_a_shrink_below_capacity_is_forced_to_colocate() -> None:
    decision = choose("2P3D", 3)
    assert (str(decision.target), decision.switch, decision.forced) == ("3C", "mode", True)
    assert "cannot be kept" in decision.reason


def test_losing_the_last_prefill_worker_is_forced_and_keeps_the_mode() -> None:
    survivors = Allocation(decode=5)
    decision = decide(QWEN3_8B, 5, survivors, ADAPTIVE)
    assert (str(decision.target), decision.switch, decision.forced) == ("2P3D", "ratio", True)


def test_a_forced_switch_changes_the_mode_when_that_gains_enough() -> None:
    decision = decide(with_overhead(0.0), 5, Allocation(decode=5), ADAPTIVE)
    assert (str(decision.target), decision.switch, decision.forced) == ("5C", "mode", True)


def test_both_modes_at_once_cannot_be_kept() -> None:
    decision = decide(QWEN3_8B, 8, Allocation(prefill=2, decode=3, colocated=3), ADAPTIVE)
    assert (str(decision.target), decision.forced) == ("3P5D", True)


# lent training GPUs


def test_lent_workers_count_for_their_share_of_the_time() -> None:
    lending = Lending(num_workers=4, share=0.75)
    decision = decide(QWEN3_8B, 4, None, ADAPTIVE, lending=lending)
    found = {str(c.allocation): c.seconds for c in decision.candidates}

    def mean(alone: str, *together: str) -> float:
        best = min(closed_form(QWEN3_8B, now(text)).seconds for text in together)
        return 1.0 / (0.25 / closed_form(QWEN3_8B, now(alone)).seconds + 0.75 / best)

    assert found["4C"] == pytest.approx(mean("4C", "8C"))
    assert found["1P3D"] == pytest.approx(mean("1P3D", "1P7D", "2P6D", "3P5D", "4P4D", "5P3D"))
    assert found["3P1D"] == pytest.approx(mean("3P1D", "3P5D", "4P4D", "5P3D", "6P2D", "7P1D"))


def test_what_is_best_does_not_change_with_the_coming_and_going_of_lent_workers() -> None:
    """Alone five workers had better stay colocated; with eight more for most of the time they are better split."""
    profile = with_overhead(1.3)
    assert str(decide(profile, 5, None, ADAPTIVE).target) == "5C"
    assert str(decide(profile, 13, None, ADAPTIVE).target) == "4P9D"
    lending = Lending(num_workers=8, share=0.9)
    both = decide(profile, 5, None, ADAPTIVE, lending=lending).target
    assert str(both) == "2P3D"
    full = decide(profile, 13, None, ADAPTIVE, base=both).target
    assert str(full) == "4P9D"
    assert decide(profile, 5, both, ADAPTIVE, lending=lending).switch == "none"


def test_roles_beside_others_leave_theirs_alone() -> None:
    decision = decide(QWEN3_8B, 8, None, ADAPTIVE, base=now("5P2D"))
    assert {str(c.allocation) for c in decision.candidates} == {"5P3D", "6P2D"}
    assert str(decide(with_overhead(9.0), 8, None, ADAPTIVE, base=now("3C")).target) == "8C"
    assert str(decide(None, 8, None, ADAPTIVE, base=now("2P2D")).target) == "2P6D"
    assert str(decide(None, 8, None, ElasticConfig(pd="3P5D"), base=now("4P1D")).target) == "4P4D"


def test_a_base_that_no_longer_holds_the_batch_is_kept_all_the_same() -> None:
    """It was decided on before; here only those beside it are asked for."""
    decision = decide(QWEN3_8B, 3, None, ADAPTIVE, base=now("1P1D"))
    assert str(decision.target) == "1P2D" or not any(c.feasible for c in decision.candidates)
    assert decision.target.prefill >= 1


# policies


def fixed(policy: str, num_workers: int, profile: Profile | None = QWEN3_8B) -> str:
    return str(decide(profile, num_workers, None, ElasticConfig(pd=policy)).target)


def test_fixed_ratio_is_exact_or_nearest_or_colocated() -> None:
    assert [fixed("3P5D", count) for count in (1, 2, 4, 5, 8, 13, 16)] == [
        "1C",
        "2C",  # one decode worker does not hold the batch
        "1P3D",
        "2P3D",
        "3P5D",
        "5P8D",
        "6P10D",
    ]
    assert fixed("3P5D", 2, None) == "1P1D"


def test_the_very_ratio_that_was_asked_for_is_taken_though_memory_is_short() -> None:
    decision = decide(QWEN3_8B, 2, None, ElasticConfig(pd="1P1D", makespan="closed-form"))
    assert str(decision.target) == "1P1D"
    assert decision.reason == "1P1D is the policy; the batch's KV cache does not fit its decode workers"


def test_colocated_policies() -> None:
    assert fixed("colocated", 8) == "8C"
    assert fixed("4C", 8) == "8C"
    assert decide(QWEN3_8B, 8, None, ElasticConfig(makespan="closed-form")).seconds == pytest.approx(
        676.2, abs=0.1
    )


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="is no allocation"):
        fixed("3D5P", 8)


def test_without_a_profile_what_is_whole_stays() -> None:
    assert str(decide(None, 8, now("3P5D"), ADAPTIVE).target) == "3P5D"
    assert str(decide(None, 8, now("3P4D"), ADAPTIVE).target) == "8C"
    assert str(decide(None, 5, Allocation(decode=5), ADAPTIVE).target) == "5C"
    assert str(decide(None, 3, None, ADAPTIVE).target) == "3C"


# always


NUMBERS = st.floats(1e-6, 1e6)
CLASSES = st.lists(
    st.builds(TrajectoryClass, **dict.fromkeys(TrajectoryClass.__struct_fields__, NUMBERS)), max_size=3
).map(tuple)


@settings(deadline=None, derandomize=True)
@given(
    st.builds(
        Profile,
        st.builds(Workload, **{**dict.fromkeys(Workload.__struct_fields__, NUMBERS), "classes": CLASSES}),
        st.builds(Platform, **dict.fromkeys(Platform.__struct_fields__, st.floats(1e-6, 1e6))),
    ),
    st.integers(1, 20),
    st.none() | st.builds(Allocation, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(["adaptive", "colocated", "3P5D"]),
    st.sampled_from(["closed-form", "network"]),
)
def test_the_target_is_feasible_whole_and_finite(
    profile: Profile, num_workers: int, current: Allocation | None, policy: str, makespan: str
) -> None:
    config = msgspec.convert({"pd": policy, "makespan": makespan}, ElasticConfig)
    decision = decide(profile, num_workers, current, config)
    chosen = next(c for c in decision.candidates if c.allocation == decision.target)
    assert chosen.feasible or str(decision.target) == policy
    assert chosen.seconds == decision.seconds
    assert decision.target.total == num_workers
    assert all(math.isfinite(candidate.seconds) for candidate in decision.candidates)
    again = decide(profile, num_workers, decision.target, config)
    assert again.target == decision.target or policy == "adaptive"
    settled = decide(profile, num_workers, again.target, config)
    assert settled.target == again.target  # no cycle


@pytest.mark.parametrize(
    ("current", "target", "switch"),
    [
        (None, "3C", "first"),
        ("3C", "3C", "none"),
        ("3C", "5C", "resize"),
        ("2P3D", "2P2D", "resize"),
        ("2P3D", "3P2D", "ratio"),
        ("2P3D", "5C", "mode"),
    ],
)
def test_kinds_of_switch(current: str | None, target: str, switch: str) -> None:
    assert switch_between(None if current is None else now(current), now(target)) == switch


def test_a_decision_takes_as_long_as_there_are_workers() -> None:
    """Not as their square; ``benchmarks/decisions.py`` has the seconds."""

    def count(size: int) -> int:
        return num_calls(lambda: choose(f"{size // 4}P{size - size // 4}D", size))

    assert count(256) < 2.1 * count(128) < 2.1**2 * count(64)
