"""Tracker and decision engine together: noise switches nothing, a change does."""

import msgspec
import pytest
from sample_profiles import shipped
from synthetic_job import SyntheticJob

from pearl.core.elastic.decision_engine import decide
from pearl.types.config import ElasticConfig
from pearl.types.plan import Allocation
from pearl.types.profile import Profile

ADAPTIVE = ElasticConfig(pd="adaptive", makespan="closed-form")


def short(name: str, *overrides: str) -> Profile:
    """With fewer turns, so that a step is quick to make up; they cancel in the choice."""
    return shipped(name, "workload.num_turns=9", "workload.env_seconds=27", *overrides)


class Loop:
    """A job whose allocation is decided after every step."""

    def __init__(self, profile: Profile, start: str, seed: int) -> None:
        self.job = SyntheticJob(profile, seed, noise=0.05)
        self.allocation = Allocation.parse(start)
        self.history: list[Allocation] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.job.step(self.allocation)
            profile = self.job.tracker.profile()
            self.allocation = decide(profile, self.allocation.total, self.allocation, ADAPTIVE).target
            self.history.append(self.allocation)


@pytest.mark.parametrize(
    ("name", "num_workers"), [("qwen3-8b", 5), ("qwen3-8b", 8), ("qwen3-8b", 13), ("qwen3-30b-a3b", 8)]
)
def test_a_stationary_noisy_workload_switches_nothing_after_3_steps(name: str, num_workers: int) -> None:
    loop = Loop(short(name), f"{num_workers}C", seed=0)
    loop.run(200)
    assert len(set(loop.history[2:])) == 1, loop.history


def disaggregated(seed: int) -> Loop:
    """A job for which colocation is dear, after it has found out."""
    loop = Loop(short("qwen3-8b", "platform.overhead_seconds=4"), "8C", seed)
    loop.run(10)
    assert str(loop.allocation) == "3P5D"
    return loop


@pytest.mark.parametrize("seed", range(3))
def test_shorter_answers_switch_the_ratio_within_2_steps(seed: int) -> None:
    loop = disaggregated(seed)
    change(loop, turn_output_tokens=0.4 * loop.job.profile.workload.turn_output_tokens)
    loop.run(2)
    assert str(loop.allocation) == "5P3D"


@pytest.mark.parametrize("seed", range(3))
def test_long_bubbles_switch_to_colocation_within_2_steps(seed: int) -> None:
    loop = disaggregated(seed)
    change(loop, bubble_ratio=6.0)
    loop.run(2)
    assert loop.allocation.is_colocated


def change(loop: Loop, **numbers: float) -> None:
    profile = loop.job.profile
    loop.job.profile = Profile(msgspec.structs.replace(profile.workload, **numbers), profile.platform)
