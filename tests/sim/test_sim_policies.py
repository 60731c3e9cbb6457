"""Policies are settings, and hardware profiles are figures with sources."""

import msgspec
import pytest
from sim_runs import CONFIG, HARDWARE, ROOT

from pearl.config import ConfigError, load
from pearl.sim import hardware, policies
from pearl.sim.comparison import half_width_95, summarize
from pearl.sim.job import Result, make_job, mean_gpus
from pearl.traces import read_trace
from pearl.types.trace import TraceEvent

SEGMENTS = sorted((ROOT / "launch" / "traces" / "segments").glob("B_*.csv"))
COLOCATED = ["config"] + [
    name for name in policies.names() if "elastic.pd=colocated" in policies.find(name).overrides
]


@pytest.mark.parametrize("name", COLOCATED)
@pytest.mark.parametrize("config", ["simulate-8b.toml", "simulate-30b.toml"])
def test_every_policy_is_settings_that_load(name: str, config: str) -> None:
    load(ROOT / "launch" / "configs" / config, policies.find(name).overrides)


def test_every_policy_sets_the_same_keys() -> None:
    """So none inherits an axis from the file by accident."""
    axes = ("inter", "borrow", "pd", "makespan")
    wanted = {*(f"elastic.{axis}" for axis in axes), "rollout.router", "rollout.start"}
    for name in policies.names():
        overrides = policies.find(name).overrides
        assert not overrides or wanted <= {o.partition("=")[0] for o in overrides}, name
    assert policies.find("config").overrides == ()


def test_other_systems_are_points_on_the_axes_with_a_caveat() -> None:
    assert policies.find("areal").overrides == policies.find("roll").overrides
    for name in (
        "areal",
        "laminar",
        "rlboost",
        "rose",
        "seamlessflow",
        "bidirl",
        "rollart",
        "nemo-rl",
        "slime",
    ):
        assert policies.find(name).caveat
    assert not policies.find("pearl").caveat


def test_an_unknown_policy_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean roll-large\?"):
        policies.find("roll_large")


def test_a_person_s_settings_go_over_the_policy_s() -> None:
    job = make_job(CONFIG, "roll", 0, overrides=("rollout.start=early",))
    assert job.config.rollout.start == "early"
    assert job.config.rollout.router == "sticky"


def test_roll_large_has_the_trace_s_mean_rounded_up_to_workers() -> None:
    means = (13.6, 9.0, 11.8)
    for path, mean, gpus in zip(SEGMENTS, means, (14, 10, 12), strict=True):
        trace = tuple(read_trace(path))
        assert 4 + mean_gpus(trace, 7200.0) == pytest.approx(mean, abs=0.05)
        job = make_job(CONFIG, "roll-large", 0, trace=trace)
        assert job.config.rollout.num_workers * 2 == gpus
        assert job.config.elastic.preemptible_gpus == 0


def test_preemptible_gpus_are_as_many_as_the_trace_ever_has() -> None:
    trace = (TraceEvent("arrive", at_s=0.0, count=6), TraceEvent("reclaim", at_s=5.0, count=2))
    assert make_job(CONFIG, "rlboost+", 0, trace=trace).config.elastic.preemptible_gpus == 6


def test_the_core_is_told_the_machine_s_memory_and_link() -> None:
    job = make_job(CONFIG, "roll", 0)
    assert job.config.emulated.kv_bandwidth_bytes_per_s == HARDWARE.worker.kv_bandwidth_bytes_per_s
    assert job.config.emulated.kv_bytes_per_token == HARDWARE.worker.kv_bytes_per_token
    assert job.config.rollout.kv_capacity_tokens == HARDWARE.worker.kv_capacity_tokens


@pytest.mark.parametrize("name", hardware.shipped_names())
def test_shipped_profiles_load_and_say_where_figures_are_from(name: str) -> None:
    profile = hardware.load(name)
    assert profile.name == name
    assert set(profile.sources) >= {"decode", "prefill", "kv", "costs", "training"}
    assert hardware.for_model(profile.model).parameter_set == "data sheet"


def test_table_3_is_kept_whole() -> None:
    for name, activation, deactivation in (("8b", 6.26, 3.18), ("30b-a3b", 6.09, 4.38)):
        costs = hardware.load(f"h800-qwen3-{name}").costs
        assert costs.offload + costs.activation == pytest.approx(activation)
        assert costs.release + costs.restore == pytest.approx(deactivation)


def test_an_unknown_profile_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean h800-qwen3-8b\?"):
        hardware.load("h800-qwen3-8")


def result(seed: int, throughput: float) -> Result:
    zeros = {
        field.name: field.type(0) for field in msgspec.structs.fields(Result) if field.type in (int, float)
    }
    return Result(**{**zeros, "seed": seed, "throughput_tokens_per_s": throughput}, per_step=[])


def test_ratios_are_paired_by_seed() -> None:
    found = summarize({"a": [result(0, 10.0), result(1, 20.0)], "b": [result(0, 20.0), result(1, 44.0)]})
    assert found["a"]["ratio"] == 1.0
    assert found["b"]["ratio"] == pytest.approx(2.1)
    assert found["b"]["throughput_tokens_per_s"] == pytest.approx(32.0)
    assert found["b"]["ratio_ci95"] == pytest.approx(12.71 * 0.1, rel=1e-3)


def test_one_seed_has_no_interval_and_no_throughput_no_ratio() -> None:
    found = summarize({"a": [result(0, 0.0)], "b": [result(0, 2.0)]})
    assert found["b"]["ratio"] is None
    assert found["b"]["ratio_ci95"] is None
    assert half_width_95([1.0, 1.0, 1.0]) == 0.0
