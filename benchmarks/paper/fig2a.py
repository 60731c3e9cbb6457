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
    shown,
    step_seconds,
)
from benchmarks.paper.runner import Run, Runs, fixed

GPUS = (16, 24, 32)
SETS = ((True, "load-bound"), (False, "data sheet"))


def run_of(gpus: int, load_bound: bool, seed: int, scale: Scale) -> Run:
    return fixed("rlboost+", gpus // 2, scale.steps, "training.num_ranks=8", seed=seed, load_bound=load_bound)


def plan(scale: Scale) -> list[Run]:
    return [run_of(g, kind, seed, scale) for seed in scale.seeds for g in GPUS for kind, _ in SETS]


def seconds(runs: Runs, scale: Scale, gpus: int, load_bound: bool) -> Estimate | None:
    found = runs.of(run_of(gpus, load_bound, seed, scale) for seed in scale.seeds)
    return estimate([value for outcome in found for value in step_seconds(outcome)])


def training_seconds(runs: Runs, scale: Scale) -> Estimate | None:
    found = runs.of(run_of(GPUS[0], True, seed, scale) for seed in scale.seeds)
    return estimate([line.train_seconds for outcome in found for line in outcome.result.per_step[1:]])


def evaluate(runs: Runs, scale: Scale) -> Figure:
    rows, series = [], []
    train = training_seconds(runs, scale)
    for kind, name in SETS:
        found = {gpus: seconds(runs, scale, gpus, kind) for gpus in GPUS}
        series.append(
            Series(
                name=f"rollout, {name}",
                values=[e and e.mean for e in found.values()],
                errors=[e and e.half_width for e in found.values()],
            )
        )
        base = found[GPUS[0]]
        for gpus, value in found.items():
            cut = f"{100 * (1 - value.mean / base.mean):.1f} %" if value and base else "-"
            said = published.ROLLOUT_TIME_CUT.get(gpus)
            times = f"{value.mean / train.mean:.1f}" if value and train else "-"
            rows.append([name, str(gpus), shown(value, 0), cut, f"{said.text} %" if said else "0 %", times])
    series.append(Series(name="training", values=[train and train.mean] * len(GPUS)))
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
            f"Training takes {shown(train, 0)} s here and {published.TRAIN_SECONDS.text} s in the paper, "
            "to which its cost "
            "was set.",
            "The paper's rollout takes "
            f"{published.ROLLOUT_OVER_TRAINING.text} times as long as training. The load-bound set was fitted to this "
            "figure's relative fall and to nothing else; its level stays below the paper's.",
            "With data-sheet costs, environments bound the step and GPUs beyond 16 change little.",
        ],
    )


MODULE = Module("fig2a", plan, evaluate)
