"""Fig. 6: throughput of every step over the segments, from the runs of Fig. 5."""

from benchmarks.paper.fig4 import levels
from benchmarks.paper.fig5 import POLICIES, SEGMENTS, run_of
from benchmarks.paper.figure import Chart, Figure, Module, Scale, Series
from benchmarks.paper.runner import MODELS, Run, Runs

SEED = 0


def plan(scale: Scale) -> list[Run]:
    return [run_of(m, segment, policy, SEED) for m in MODELS for segment in SEGMENTS for policy in POLICIES]


def _series(runs: Runs, model: str, segment: int) -> list[Series]:
    """A step's throughput holds from the end of the one before to its own."""
    found = []
    for policy in POLICIES:
        for outcome in runs.of([run_of(model, segment, policy, SEED)]):
            steps = outcome.result.per_step
            values = [line.throughput_tokens_per_s for line in steps]
            begins = [(line.end_s - line.seconds) / 60 for line in steps]
            ends = [line.end_s / 60 for line in steps[-1:]]
            found.append(Series(name=policy, x=begins + ends, values=[*values, *values[-1:]]))
    return found


def evaluate(runs: Runs, scale: Scale) -> Figure:
    charts = []
    for model, title in MODELS.items():
        for segment in SEGMENTS:
            series = _series(runs, model, segment)
            top = max((v for line in series for v in line.values if v), default=1.0)
            gpus = levels(segment)
            budget = Series(
                name="rollout GPUs (16 = the top)",
                x=[minute for minute, _ in gpus],
                values=[top * count / 16 for _, count in gpus],
                paper=True,
            )
            name = f"{title}, segment {segment}"
            charts.append(
                Chart(
                    title=name, kind="steps", series=[*series, budget], x_title="minutes", y_title="tokens/s"
                )
            )
    return Figure(
        name="fig6",
        title="Fig. 6: throughput of every step",
        parameters=f"as Fig. 5, seed {SEED}",
        charts=charts,
        remarks=[
            "As in the paper, RLBoost+ follows the GPUs down in the middle of segment 2, while lent "
            "training GPUs carry "
            "PEARL through.",
            "Batches differ by 18 % in their length, so that single steps of one seed show as much "
            "chance as resources.",
        ],
    )


MODULE = Module("fig6", plan, evaluate)
