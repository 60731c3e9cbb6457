"""Fig. 4: dedicated rollout GPUs over the three two-hour segments."""

from benchmarks.paper import published
from benchmarks.paper.figure import Chart, Figure, Module, Scale, Series, Table
from benchmarks.paper.runner import ROOT, TWO_HOURS_S, Run, Runs
from pearl.sim.job import mean_gpus
from pearl.traces import counts, read_trace

RESERVED = 4
SEGMENTS = (1, 2, 3)


def levels(segment: int) -> list[tuple[float, int]]:
    """(minute, rollout GPUs) whenever they change."""
    trace = tuple(read_trace(ROOT / "launch" / "traces" / "segments" / f"B_p3_tp2_seg{segment}.csv"))
    found = [(at / 60, gpus + RESERVED) for at, gpus in counts(trace)]
    return [(0.0, RESERVED), *found, (TWO_HOURS_S / 60, found[-1][1])]


def changes(segment: int) -> int:
    return sum(minute > 0 for minute, _ in levels(segment)[:-1])


def mean(segment: int) -> float:
    trace = tuple(read_trace(ROOT / "launch" / "traces" / "segments" / f"B_p3_tp2_seg{segment}.csv"))
    return RESERVED + mean_gpus(trace, TWO_HOURS_S)


def plan(scale: Scale) -> list[Run]:
    return []


def evaluate(runs: Runs, scale: Scale) -> Figure:
    series = [
        Series(
            name=f"segment {segment}",
            x=[minute for minute, _ in levels(segment)],
            values=[float(gpus) for _, gpus in levels(segment)],
        )
        for segment in SEGMENTS
    ]
    rows = [
        [
            str(s),
            f"{mean(s):.1f}",
            f"{published.MEAN_GPUS[s]}",
            str(changes(s)),
            str(published.LARGE_POOL[s]),
        ]
        for s in SEGMENTS
    ]
    return Figure(
        name="fig4",
        title="Fig. 4: rollout GPUs over the three segments",
        parameters="Bamboo's p3 trace, cut in even counts for workers of two GPUs; 4 reserved and up to 12 preemptible",
        charts=[
            Chart(title="rollout GPUs", kind="steps", series=series, x_title="minutes", y_title="GPUs"),
        ],
        tables=[Table(header=["segment", "mean", "paper", "changes", "ROLL-Large's pool"], rows=rows)],
        remarks=[
            "The paper does not say where it cut its segments; these have its means, and its order of changes."
        ],
    )


MODULE = Module("fig4", plan, evaluate)
