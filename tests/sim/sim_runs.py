"""A small simulated job: 2 training GPUs, 2 dedicated workers, batches of 16, short trajectories."""

from pathlib import Path
from typing import Any

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
    **more: Any,
) -> Job:
    import msgspec

    job = make_job(CONFIG, policy, seed, overrides=(*SHORT, *overrides), horizon_s=1200.0, **more)
    return msgspec.structs.replace(job, hardware=hardware)


SMALL = small_job()
