"""Regret: what the chosen allocation loses against the best of all that were simulated.

Workloads and budgets are drawn at random. An allocation is chosen from the profile that one colocated batch gave, the
best one by simulating every allocation with the same seed; both are scored with another seed.
"""

import random
from typing import NamedTuple

from benchmarks.paper.figure import Chart, Figure, Module, Scale, Series, Table, estimate, shown
from benchmarks.paper.runner import HARDWARE, Outcome, Run, Runs, fixed
from benchmarks.paper.table2 import selected, with_overhead
from pearl.state.profile import Profile

SEED_BASE = 10_000
SELECT, SCORE = SEED_BASE, 2 * SEED_BASE  # seeds of a draw are these plus its number
MODELS_OF_MAKESPAN = ("closed-form", "fluid", "network")


class Draw(NamedTuple):
    number: int
    model: str
    load_bound: bool
    batch: int
    length: int
    workers: int


def draws(scale: Scale) -> list[Draw]:
    rng = random.Random("regret")
    return [
        Draw(
            number,
            rng.choice(tuple(HARDWARE)),
            rng.random() < 0.75,
            rng.choice((32, 48, 64, 96) if scale.full else (16, 32, 48)),
            rng.choice((16384, 24576, 32768)),
            rng.randint(2, 12 if scale.full else 6),
        )
        for number in range(400 if scale.full else 200)
    ]


def allocations(workers: int) -> list[str]:
    return [f"{workers}C", *(f"{p}P{workers - p}D" for p in range(1, workers))]


def run_of(draw: Draw, allocation: str, base: int) -> Run:
    pd = "colocated" if allocation.endswith("C") else allocation
    settings = [
        f"data.batch_size={draw.batch}",
        f"rollout.max_context_tokens={draw.length}",
        f"elastic.pd={pd}",
    ]
    if draw.length <= 16384:
        settings.append(f"rollout.max_new_tokens_per_turn={draw.length // 2}")
    return fixed(
        "a", draw.workers, 1, *settings, model=draw.model, load_bound=draw.load_bound, seed=base + draw.number
    )


def plan(scale: Scale) -> list[Run]:
    return [
        run_of(draw, allocation, base)
        for draw in draws(scale)
        for allocation in allocations(draw.workers)
        for base in (SELECT, SCORE)
    ]


class Regret(NamedTuple):
    """Of one draw, as a part of the best's makespan; negative where chance favoured the choice on the new seed."""

    draw: Draw
    best: str
    chosen: dict[str, str]
    regret: dict[str, float]


def _makespans(runs: Runs, draw: Draw, base: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for allocation in allocations(draw.workers):
        for outcome in runs.of([run_of(draw, allocation, base)]):
            if outcome.result.per_step:
                found[allocation] = outcome.first_rollout_seconds
    return found


def judge(runs: Runs, draw: Draw) -> Regret | None:
    """None while runs are missing."""
    picked, scored = _makespans(runs, draw, SELECT), _makespans(runs, draw, SCORE)
    profile = _profile(runs.of([run_of(draw, f"{draw.workers}C", SELECT)]))
    if profile is None or any(len(found) < draw.workers for found in (picked, scored)):
        return None
    best = min(picked, key=lambda allocation: picked[allocation])
    colocated_s = picked[f"{draw.workers}C"]
    chosen = {
        model: str(selected(with_overhead(profile, draw.workers, model, colocated_s), draw.workers, model))
        for model in MODELS_OF_MAKESPAN
    }
    chosen["always colocated"] = f"{draw.workers}C"
    return Regret(draw, best, chosen, {name: scored[a] / scored[best] - 1 for name, a in chosen.items()})


def _profile(found: list[Outcome]) -> Profile | None:
    return found[0].profile if found else None


def evaluate(runs: Runs, scale: Scale) -> Figure:
    judged = [regret for draw in draws(scale) if (regret := judge(runs, draw))]
    names = (*MODELS_OF_MAKESPAN, "always colocated")
    rows = []
    series = []
    for name in names:
        values = sorted(100 * regret.regret[name] for regret in judged)
        p95 = f"{values[min(len(values) - 1, int(0.95 * len(values)))]:.1f} %" if values else "-"
        same = sum(regret.chosen[name] == regret.best for regret in judged)
        rows.append([name, f"{shown(estimate(values), 2)} %", p95, f"{same} of {len(judged)}"])
        series.append(Series(name=name, x=[float(i) for i in range(len(values))], values=list(values)))
    detail = [
        [
            f"{HARDWARE[r.draw.model]}{'-load-bound' if r.draw.load_bound else ''}",
            f"{r.draw.batch}, {r.draw.length // 1024}K",
            str(r.draw.workers),
            r.best,
            *(f"{r.chosen[name]} ({100 * r.regret[name]:+.1f} %)" for name in names),
        ]
        for r in judged[:24]
    ]
    return Figure(
        name="regret",
        title="Regret of the chosen allocation",
        parameters=f"{len(judged)} random workloads and budgets, every allocation simulated, one batch; "
        "chosen with one seed, scored "
        "with another",
        charts=[
            Chart(title="regret, sorted", kind="lines", series=series, x_title="workload", y_title="%"),
        ],
        tables=[
            Table(header=["chooser", "mean", "95 % of them below", "chose the best"], rows=rows),
            Table(header=["hardware", "batch, length", "workers", "best", *names], rows=detail),
        ],
        remarks=[
            "Negative values are chance: the best was picked with one seed and another one counts.",
            "--full draws 200 workloads with up to 12 workers.",
        ],
    )


MODULE = Module("regret", plan, evaluate)
