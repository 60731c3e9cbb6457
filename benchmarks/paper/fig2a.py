"""Fig. 2(a): rollout and training time of RLBoost+ as rollout GPUs are added."""

from benchmarks.paper import published
from benchmarks.paper.figure import (
    Chart,
    Estimate,
    Figure,
    Module,
    Scale,
    Series,
    Table,
    estimate,
    mean_of,
    shown,
    step_ratio,
    step_seconds,
)
from benchmarks.paper.runner import Run, Runs, fixed

GPUS = (16, 24, 32)
SETS = ((True, "load-bound"), (False, "data sheet"))


def run_of(gpus: int, load_bound: bool, seed: int, scale: Scale) -> Run:
    return fixed("rlboost+", gpus // 2, scale.steps, "training.num_ranks=8", seed=seed, load_bound=load_bound)


def plan(scale: Scale) -> list[Run]:
    return [run_of(g, kind, seed, scale) for seed in scale.seeds for g in GPUS for kind, _ in SETS]


def seconds(runs: Runs, scale: Scale, gpus: int, load_bound: bool) -> float | None:
    """Of a step. Batches differ by far more than pools, so that an interval would say nothing."""
    found = runs.of(run_of(gpus, load_bound, seed, scale) for seed in scale.seeds)
    return mean_of(estimate([value for outcome in found for value in step_seconds(outcome)]))


def cut(runs: Runs, scale: Scale, gpus: int, load_bound: bool) -> Estimate | None:
    """Percent less than with the fewest GPUs, over the same batches."""
    pairs = runs.pairs(
        (run_of(GPUS[0], load_bound, seed, scale), run_of(gpus, load_bound, seed, scale))
        for seed in scale.seeds
    )
    found = step_ratio(pairs)
    if found is None:
        return None
    return Estimate(100 * (1 - found.mean), found.half_width and 100 * found.half_width)


def training_seconds(runs: Runs, scale: Scale) -> float | None:
    found = runs.of(run_of(GPUS[0], True, seed, scale) for seed in scale.seeds)
    return mean_of(
        estimate([line.train_seconds for outcome in found for line in outcome.result.per_step[1:]])
    )


def evaluate(runs: Runs, scale: Scale) -> Figure:
    rows, series = [], []
    train = training_seconds(runs, scale)
    for kind, name in SETS:
        found = {gpus: seconds(runs, scale, gpus, kind) for gpus in GPUS}
        series.append(Series(name=f"rollout, {name}", values=list(found.values())))
        for gpus, value in found.items():
            said = published.ROLLOUT_TIME_CUT.get(gpus)
            less = "-" if gpus == GPUS[0] else f"{shown(cut(runs, scale, gpus, kind))} %"
            level = f"{value:.0f}" if value else "-"
            times = f"{value / train:.1f}" if value and train else "-"
            rows.append([name, str(gpus), level, less, f"{said.text} %" if said else "-", times])
    series.append(Series(name="training", values=[train] * len(GPUS)))
    return Figure(
        name="fig2a",
        title="Fig. 2(a): rollout and training time, RLBoost+, Qwen3-8B, 8 training GPUs",
        parameters=f"batch 64, fixed pools, seeds {list(scale.seeds)}, batches 2 to {scale.steps} of "
        "each; a step's time "
        "is its rollout's, since training runs beside it",
        charts=[
            Chart(
                title="seconds of a step",
                kind="bars",
                labels=[f"{gpus} GPUs" for gpus in GPUS],
                series=series,
                y_title="s",
            )
        ],
        tables=[
            Table(
                header=["parameters", "rollout GPUs", "step s", "less than 16", "paper", "times training"],
                rows=rows,
            )
        ],
        remarks=[
            f"Training takes {train or 0:.0f} s here and {published.TRAIN_SECONDS.text} s in the paper, "
            "to which its cost "
            "was set.",
            "The paper's rollout takes "
            f"{published.ROLLOUT_OVER_TRAINING.text} times as long as training. The load-bound set was fitted to this "
            "figure's relative fall and to nothing else; its level stays below the paper's.",
            "With data-sheet costs, environments bound the step and GPUs beyond 16 change little.",
        ],
    )


MODULE = Module("fig2a", plan, evaluate)
