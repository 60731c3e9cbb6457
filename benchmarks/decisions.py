"""How long a decision and a plan take, and how they grow with the number of workers.

    python benchmarks/decisions.py [--profile launch/profiles/qwen3-8b.json] [--json FILE]

Each decision is about a profile of its own, since predictions are remembered; with the network model, about a batch of
ten classes of trajectories. Needs one core and a few seconds. Exit code 1 when a decision for 64 workers takes 1 ms or
more with the closed form, or a plan for 4,096 workers 50 ms or more.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pearl.core.elastic.decision_engine import decide
from pearl.core.elastic.orchestration import make_plan
from pearl.core.elastic.profile_file import read_profile
from pearl.types.config import ElasticConfig
from pearl.types.ids import Slot
from pearl.types.plan import Allocation, Role
from pearl.types.profile import Profile, TrajectoryClass

SIZES = (4, 16, 64, 256, 1024, 4096)
DECISION_LIMIT_S, DECISION_SIZE = 1e-3, 64
PLAN_LIMIT_S, PLAN_SIZE = 50e-3, 4096
ROUNDS = 9
NUM_CLASSES = 10
Makespan = Literal["closed-form", "fluid", "network"]


class Row(NamedTuple):
    what: str
    workers: int
    seconds: float


def best_of(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The least of some rounds: what the work takes without what else runs on the machine."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def decision(profile: Profile, model: Makespan, size: int) -> Row:
    config = ElasticConfig(pd="adaptive", makespan=model)
    current = Allocation(prefill=size // 4, decode=size - size // 4)
    profiles = iter(varied(profile) if model == "network" else [profile] * ROUNDS)
    seconds = best_of(lambda: decide(next(profiles), size, current, config, thorough=False))
    return Row(f"decide, {model}", size, seconds)


def varied(profile: Profile) -> list[Profile]:
    """The profile with classes of trajectories that live between a quarter and twice as long as its own."""
    load, replace = profile.workload, msgspec.structs.replace
    turns = load.mean_turns or load.num_turns
    classes = tuple(
        TrajectoryClass(
            share=1 / NUM_CLASSES,
            turns=turns * (0.25 + 1.75 * number / (NUM_CLASSES - 1)),
            input_tokens=load.turn_input_tokens,
            input_tokens2=2 * load.turn_input_tokens**2,
            output_tokens=load.turn_output_tokens,
            env_seconds=load.env_seconds / turns,
            context_tokens=turns * (load.turn_input_tokens + load.turn_output_tokens),
        )
        for number in range(NUM_CLASSES)
    )
    return [
        replace(profile, workload=replace(load, classes=classes, batch_size=load.batch_size + round))
        for round in range(ROUNDS)
    ]


def plan(size: int) -> Row:
    """An eighth leaves, an eighth joins, and half of the rest change their role."""
    current: dict[Slot, Role] = {Slot(i): "prefill" if i % 2 else "decode" for i in range(size)}
    leavers = [Slot(i) for i in range(0, size, 8)]
    joiners = [Slot(size + i) for i in range(len(leavers))]
    target = Allocation(prefill=size // 8, decode=size - size // 8)
    return Row("plan", size, best_of(lambda: make_plan(current, leavers, joiners, target)))


def measure(profile: Profile) -> list[Row]:
    models: tuple[Makespan, ...] = ("closed-form", "fluid", "network")
    rows = [decision(profile, model, size) for model in models for size in SIZES]
    return rows + [plan(size) for size in SIZES]


def too_slow(rows: list[Row]) -> list[str]:
    limits = {("decide, closed-form", DECISION_SIZE): DECISION_LIMIT_S, ("plan", PLAN_SIZE): PLAN_LIMIT_S}
    return [
        f"{row.what} for {row.workers} workers: {row.seconds * 1e3:.3g} ms, limit {limit * 1e3:.3g} ms"
        for row in rows
        if (limit := limits.get((row.what, row.workers))) is not None and row.seconds >= limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, default=Path("launch/profiles/qwen3-8b.json"))
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    rows = measure(read_profile(options.profile.read_bytes()))
    for row in rows:
        print(f"{row.what:22}{row.workers:6} workers {row.seconds * 1e3:10.3f} ms")
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    wrong = too_slow(rows)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
