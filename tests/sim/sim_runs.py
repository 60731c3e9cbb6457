"""A small simulated job: 2 training GPUs, 2 dedicated workers, batches of 16, short trajectories."""

from pathlib import Path
from typing import Any

import msgspec

from pearl.sim import hardware
from pearl.sim.hardware import Hardware
from pearl.sim.job import Job, make_job

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "launch" / "configs" / "simulate-8b.toml"
HARDWARE = hardware.load("h800-qwen3-8b")
SHORT = (
    "data.batch_size=16",
    "data.group_size=4",
    "training.num_ranks=4",
    "rollout.num_workers=2",
    "rollout.max_context_tokens=8192",
    "rollout.max_new_tokens_per_turn=4096",
)


def small_job(
    *,
    policy: str = "roll",
    seed: int = 0,
    overrides: tuple[str, ...] = (),
    hardware: Hardware = HARDWARE,
    pd: str = "colocated",
    **more: Any,
) -> Job:
    job = make_job(CONFIG, policy, seed, overrides=(*SHORT, *overrides), horizon_s=1200.0, **more)
    elastic = msgspec.structs.replace(job.config.elastic, pd=pd)
    config = msgspec.structs.replace(job.config, elastic=elastic)
    return msgspec.structs.replace(job, config=config, hardware=hardware)


SMALL = small_job()
