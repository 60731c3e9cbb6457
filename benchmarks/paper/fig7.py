"""Fig. 7: what each part adds, with fixed pools of 4 to 16 rollout GPUs."""

from benchmarks.paper import published
from benchmarks.paper.figure import (
    Chart,
    Estimate,
    Figure,
    Module,
    Scale,
    Series,
    Table,
    mean_of,
    shown,
    step_ratio,
    width_of,
)
from benchmarks.paper.runner import MODELS, Run, Runs, fixed

GPUS = (4, 8, 12, 16)
PARTS = ("a", "a+b", "a+b+c")
SPREAD = "roll, cache-aware"
FORCED = "a, forced 1P1D"
FORCED_96 = "a, forced 1P1D, batch 96"
FORCED_SEEDS = range(12)
"""Of the forced split with 4 GPUs, which few seeds do not tell from chance."""


def forced(model: str, kind: str, policy: str, seed: int, scale: Scale) -> Run:
    settings = ["elastic.pd=1P1D"] if policy == "a" else []
    if kind == FORCED_96:
        settings.append("data.batch_size=96")
    return fixed(policy, 2, scale.steps, *settings, model=model, seed=seed)


def run_of(model: str, gpus: int, kind: str, seed: int, scale: Scale) -> Run:
    extra = ("rollout.router=cache-aware",) if kind == SPREAD else ()
    policy = "roll" if kind == SPREAD else kind
    return fixed(policy, gpus // 2, scale.steps, *extra, model=model, seed=seed)


def plan(scale: Scale) -> list[Run]:
    return [
        run_of(model, gpus, kind, seed, scale)
        for seed in scale.seeds
        for model in MODELS
        for gpus in GPUS
        for kind in ("roll", SPREAD, *PARTS)
    ] + [
        forced(model, kind, policy, seed, scale)
        for model in MODELS
        for kind in (FORCED, FORCED_96)
        for policy in ("a", "roll")
        for seed in FORCED_SEEDS
    ]


def gain(runs: Runs, scale: Scale, model: str, gpus: int, kind: str) -> Estimate | None:
    """Over ROLL, percent."""
    if kind in (FORCED, FORCED_96):
        pairs = [
            (forced(model, kind, "a", seed, scale), forced(model, kind, "roll", seed, scale))
            for seed in FORCED_SEEDS
        ]
    else:
        pairs = [
            (run_of(model, gpus, kind, seed, scale), run_of(model, gpus, "roll", seed, scale))
            for seed in scale.seeds
        ]
    found = step_ratio(runs.pairs(pairs))
    return found and found.percent()


def _paper(model: str, gpus: int, kind: str) -> str:
    part = "a" if kind == FORCED else kind
    if kind in (SPREAD, FORCED_96) or (gpus == 4 and kind == "a"):
        return "-"
    said = published.ABLATION[model, 4][part] if gpus == 4 else published.ABLATION_8_TO_16[model][part]
    return f"{said.text} %"


def evaluate(runs: Runs, scale: Scale) -> Figure:
    charts, rows = [], []
    for model, title in MODELS.items():
        series = []
        for kind in (SPREAD, *PARTS):
            found = [gain(runs, scale, model, gpus, kind) for gpus in GPUS]
            series.append(
                Series(name=kind, values=[mean_of(e) for e in found], errors=[width_of(e) for e in found])
            )
        labels = [f"{gpus} GPUs" for gpus in GPUS]
        charts.append(
            Chart(title=f"{title}, over ROLL", kind="bars", labels=labels, series=series, y_title="%")
        )
        for gpus in GPUS:
            for kind in (SPREAD, *([FORCED, FORCED_96] if gpus == 4 else []), *PARTS):
                found_gain = shown(gain(runs, scale, model, gpus, kind))
                rows.append([title, str(gpus), kind, f"{found_gain} %", _paper(model, gpus, kind)])
    return Figure(
        name="fig7",
        title="Fig. 7: ablation with fixed pools",
        parameters=f"load-bound, 16 training GPUs, seeds {list(scale.seeds)}, batches 2 to {scale.steps}, "
        "the same under all; "
        "A: roles by decision, B: training GPUs lent always, C: lent when the gate expects a gain",
        charts=charts,
        tables=[
            Table(
                header=["model", "rollout GPUs", "policy", "over ROLL", "paper (8 to 16: a range)"], rows=rows
            )
        ],
        remarks=[
            "A, B and C route cache-aware, ROLL keeps a trajectory on one worker; the first bar is what routing alone "
            "brings.",
            "An iteration of these engines slows by the prefill in it and by no more: what else interference costs on "
            "real GPUs is not modelled.",
            "The load-bound costs were fitted to Fig. 2(a), not to this figure.",
        ],
    )


MODULE = Module("fig7", plan, evaluate)
