"""A budget that goes 2 -> 4 -> 6 -> 3 workers: deciding while it runs is faster than every fixed choice.

On the simulator's own timing, which shares no formula with the models that decide. Prefill weighs about as much as
decoding: two workers cannot spare one for each, three or more can, and the reclaim leaves a ratio that is wrong.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
from sim_runs import CONFIG

from pearl import config as settings
from pearl.sim.hardware import Costs, Hardware, TrainingSpeed, WorkerSpeed
from pearl.sim.simulation import Simulation
from pearl.sim.workload import Synthetic, SyntheticWorkload
from pearl.types.trace import TraceEvent

STEPS = 6
"""Under each budget."""
TRACE = (
    TraceEvent("arrive", at_step=STEPS, gpus=("local/3", "local/4")),
    TraceEvent("arrive", at_step=2 * STEPS, gpus=("local/5", "local/6")),
    TraceEvent("reclaim", at_step=3 * STEPS, gpus=("local/3", "local/4", "local/5"), grace_s=5.0),
)
SETTINGS = (
    f"run.num_steps={4 * STEPS}",
    "data.batch_size=32",
    "data.group_size=4",
    "training.num_ranks=1",
    "environment.max_turns=8",
    "rollout.gpus_per_worker=1",
    "rollout.num_workers=2",
    "rollout.max_in_flight=32",
    "rollout.update_mode=in_place",
    "rollout.kv_capacity_tokens=655360",
    "rollout.prefill_chunk_tokens=8192",
    "elastic.inter=true",
    "elastic.preemptible_gpus=4",
    "elastic.preparation_prior_s=1.0",
)
HARDWARE = Hardware(
    name="small",
    model="none",
    parameter_set="a test's",
    worker=WorkerSpeed(
        gpus=1,
        decode_fixed_seconds=12e-3,
        decode_seconds_per_sequence=0.12e-3,
        decode_seconds_per_context_token=0.0,
        prefill_seconds_per_token=13e-6,
        prefill_seconds_per_context_token=0.0,
        prefill_chunk_tokens=8192,
        kv_capacity_tokens=655360,
        kv_bytes_per_token=147456.0,
        kv_bandwidth_bytes_per_s=500e9,
        turn_overhead_seconds=0.03,
    ),
    costs=Costs(
        trainer_start=1.0,
        preparation=0.5,
        finalization=0.1,
        weight_transfer=0.02,
        weight_load=0.02,
        activation=0.3,
        release=0.2,
        offload=0.2,
        restore=0.2,
        role_switch=0.05,
        mode_switch=0.05,
        exit=0.1,
    ),
    training=TrainingSpeed(fixed_seconds=0.02, gpu_seconds_per_token=0.0),
)
WORKLOAD = SyntheticWorkload(
    mean_turns=3.0,
    prompt_tokens=4000.0,
    generated_tokens=50.0,
    observation_tokens=4000.0,
    env_seconds=0.02,
    task_sigma=0.03,
    member_sigma=0.03,
    token_sigma=0.05,
    env_sigma=0.3,
)


class Outcome(NamedTuple):
    seconds: float
    targets: list[str]
    """Allocations that were decided on, one after the other."""
    mode_switches: object
    ratio_switches: object


def outcome(pd: str, seed: int, *more: str) -> Outcome:
    config = settings.load(CONFIG, [*SETTINGS, f"elastic.pd={pd}", f"run.seed={seed}", *more])
    simulation = Simulation(config, Synthetic("test", seed, WORKLOAD), HARDWARE, seed, trace=TRACE)
    summary = simulation.run(1e4).summary
    assert len(simulation.metrics.steps) == 4 * STEPS
    targets = [""] + [decision.target for decision in simulation.metrics.decisions]
    return Outcome(
        sum(step.seconds for step in simulation.metrics.steps),
        [after for before, after in pairwise(targets) if before != after],
        summary["mode_switches"],
        summary["ratio_switches"],
    )


@pytest.mark.parametrize("seed", range(2))
def test_mode_and_ratio_change_by_themselves_and_no_fixed_choice_is_faster(seed: int) -> None:
    adaptive = outcome("adaptive", seed)
    assert adaptive.targets == ["2C", "3P1D", "5P1D", "2P1D"]
    assert adaptive.mode_switches == 1
    assert adaptive.ratio_switches == 0, "the ratio follows from the roles of those that join and leave"
    for fixed in ("colocated", "1P1D", "2P1D", "1P2D"):
        assert adaptive.seconds < outcome(fixed, seed).seconds, fixed
