"""How long a decision and a plan take, and how they grow with the number of workers.

    python benchmarks/decisions.py [--profile launch/profiles/qwen3-8b.json] [--json FILE]

Needs one core and a few seconds. Exit code 1 when a decision for 64 workers takes 1 ms or more with the closed form, or
a plan for 4,096 workers 50 ms or more.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pearl.elastic.decision_engine import MODELS, decide
from pearl.elastic.orchestration import make_plan
from pearl.elastic.profile_file import read_profile
from pearl.state.config import ElasticConfig
from pearl.state.ids import Slot
from pearl.state.plan import Allocation, Role
from pearl.state.profile import Profile

SIZES = (4, 16, 64, 256, 1024, 4096)
MOST_FOR_FLUID = 256
DECISION_LIMIT_S, DECISION_SIZE = 1e-3, 64
PLAN_LIMIT_S, PLAN_SIZE = 50e-3, 4096
ROUNDS = 9


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


def decision(profile: Profile, model: str, size: int) -> Row:
    config = ElasticConfig(pd="adaptive", makespan="fluid" if model == "fluid" else "closed-form")
    current = Allocation(prefill=size // 4, decode=size - size // 4)
    return Row(f"decide, {model}", size, best_of(lambda: decide(profile, size, current, config)))


def plan(size: int) -> Row:
    """An eighth leaves, an eighth joins, and half of the rest change their role."""
    current: dict[Slot, Role] = {Slot(i): "prefill" if i % 2 else "decode" for i in range(size)}
    leavers = [Slot(i) for i in range(0, size, 8)]
    joiners = [Slot(size + i) for i in range(len(leavers))]
    target = Allocation(prefill=size // 8, decode=size - size // 8)
    return Row("plan", size, best_of(lambda: make_plan(current, leavers, joiners, target)))


def measure(profile: Profile) -> list[Row]:
    rows = [decision(profile, name, size) for name in MODELS for size in SIZES if is_in_range(name, size)]
    return rows + [plan(size) for size in SIZES]


def is_in_range(model: str, size: int) -> bool:
    return model != "fluid" or size <= MOST_FOR_FLUID


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
