"""Regret: what the chosen allocation loses against the best of all that were simulated.

Workloads and budgets are drawn at random. An allocation is chosen from the profile that one colocated batch gave, the
best one by simulating every allocation with the same seed; both are scored with another seed.
"""

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.paper.figure import Chart, Figure, Module, Scale, Series, Table, estimate, shown
from benchmarks.paper.runner import HARDWARE, Outcome, Run, Runs, fixed
from benchmarks.paper.table2 import selected, with_overhead
from pearl.core.elastic.decision_engine import MODELS
from pearl.types.plan import Allocation
from pearl.types.profile import Profile

SEED_BASE = 10_000
SELECT, SCORE = SEED_BASE, 2 * SEED_BASE  # seeds of a draw are these plus its number
MODELS_OF_MAKESPAN = ("closed-form", "fluid", "network")
KINDS = ("colocated", "few prefill workers", "about half", "few decode workers")


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
    hindsight: dict[str, float]  # over what was best with the new seed, which nobody could know
    errors: dict[str, dict[str, float]]  # model -> allocation -> predicted over simulated


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
    workers, colocated = draw.workers, f"{draw.workers}C"
    profiles = {m: with_overhead(profile, workers, m, picked[colocated]) for m in MODELS_OF_MAKESPAN}
    chosen = {m: str(selected(known, workers, m)) for m, known in profiles.items()}
    chosen["always colocated"] = colocated
    best, least = min(picked, key=lambda allocation: picked[allocation]), min(scored.values())
    return Regret(
        draw,
        best,
        chosen,
        {name: scored[a] / scored[best] - 1 for name, a in chosen.items()},
        {name: scored[a] / least - 1 for name, a in chosen.items()},
        {
            m: {a: MODELS[m](known, Allocation.parse(a)).seconds / seconds for a, seconds in picked.items()}
            for m, known in profiles.items()
        },
    )


def _profile(found: list[Outcome]) -> Profile | None:
    return found[0].profile if found else None


def _kind(allocation: str) -> str:
    parsed = Allocation.parse(allocation)
    if parsed.is_colocated:
        return KINDS[0]
    share = parsed.prefill / parsed.total
    return KINDS[1] if share <= 0.34 else KINDS[2] if share < 0.66 else KINDS[3]


def _error_rows(judged: list[Regret]) -> list[list[str]]:
    """A model's mean error by kind of allocation, and how far apart its errors are within a budget."""
    rows = []
    for model in MODELS_OF_MAKESPAN:
        found = [(_kind(a), 100 * (ratio - 1)) for r in judged for a, ratio in r.errors[model].items()]
        by_kind = [estimate([error for kind, error in found if kind == wanted]) for wanted in KINDS]
        spreads = [100 * statistics.pstdev(r.errors[model].values()) for r in judged]
        apart = f"{statistics.fmean(spreads):.1f} %" if spreads else "-"
        rows.append([model, *(f"{shown(e)} %" for e in by_kind), apart])
    return rows


def _chooser_rows(judged: list[Regret], names: Sequence[str]) -> list[list[str]]:
    rows = []
    for name in names:
        values = sorted(100 * r.regret[name] for r in judged)
        p95 = f"{values[min(len(values) - 1, int(0.95 * len(values)))]:.1f} %" if values else "-"
        hindsight = estimate([100 * r.hindsight[name] for r in judged])
        same = sum(r.chosen[name] == r.best for r in judged)
        told = (f"{shown(estimate(values), 2)} %", p95, f"{shown(hindsight, 2)} %")
        rows.append([name, *told, f"{same} of {len(judged)}"])
    return rows


def evaluate(runs: Runs, scale: Scale) -> Figure:
    judged = [regret for draw in draws(scale) if (regret := judge(runs, draw))]
    names = (*MODELS_OF_MAKESPAN, "always colocated")
    series = []
    for name in names:
        values = sorted(100 * r.regret[name] for r in judged)
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
            Table(
                header=[
                    "chooser",
                    "mean regret",
                    "95 % of them below",
                    "over the best in hindsight",
                    "chose the best",
                ],
                rows=_chooser_rows(judged, names),
            ),
            Table(
                header=["predicted over simulated", *KINDS, "apart within a budget"],
                rows=_error_rows(judged),
            ),
            Table(header=["hardware", "batch, length", "workers", "best", *names], rows=detail),
        ],
        remarks=[
            "The regret is over the allocation that was best with the other seed; negative values are chance. The best "
            "in hindsight is picked with the very seed that counts, which nobody could know: an upper bound.",
            "Where the closed form errs: it takes the batch's load for that of its first turns until the end (S times "
            "all B), or, where the slowest trajectory has few but long turns, for a fraction of it; it knows neither "
            "queues nor prefixes that memory cannot keep; and the longer of prefill and decode stands for both, though "
            "a turn pays one after the other. The survival fluid has queues and a falling load, and turns that are all "
            "alike. The network model has classes of trajectories, with their own turns, tokens and contexts.",
            "All three use the same fit of the engines' iterations, which tells the cost of contexts from that of "
            "sequences: without it, b came out at a third of what it is, and every model chose too few decode workers.",
            "--full draws 400 workloads with up to 12 workers and batches up to 96.",
        ],
    )


MODULE = Module("regret", plan, evaluate)
