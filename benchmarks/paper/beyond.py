"""Better than the paper: early start, cache-aware routing and the fluid predictor, each over the paper's PEARL."""

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
    throughput_ratio,
    width_of,
)
from benchmarks.paper.runner import MODELS, Run, Runs

SEGMENTS = (1, 2, 3)
STICKY = "rollout.router=sticky"
EARLY = "rollout.start=early"
NETWORK = "elastic.makespan=network"
BASE = "pearl"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    BASE: ("pearl", ()),
    "routed as ROLL, a trajectory on one worker": ("pearl", (STICKY,)),
    "+ network model": ("pearl", (NETWORK,)),
    "+ early start": ("pearl", (EARLY,)),
    "+ early start and network model (preset pearl+)": ("pearl+", ()),
    "+ early start, without roles": ("colocated+", (EARLY,)),
}


def models(scale: Scale) -> tuple[str, ...]:
    return tuple(MODELS) if scale.full else ("8b",)


def run_of(model: str, segment: int, variant: str, seed: int) -> Run:
    policy, overrides = VARIANTS[variant]
    return Run(policy=policy, overrides=overrides, model=model, segment=segment, seed=seed)


def plan(scale: Scale) -> list[Run]:
    return [
        run_of(model, segment, variant, seed)
        for seed in scale.few_trace_seeds
        for model in models(scale)
        for variant in VARIANTS
        for segment in SEGMENTS
    ]


def ratio(runs: Runs, scale: Scale, model: str, variant: str, segments: tuple[int, ...]) -> Estimate | None:
    """To the paper's PEARL; over all segments each pair of a segment and a seed counts once."""
    pairs = (
        (run_of(model, segment, variant, seed), run_of(model, segment, BASE, seed))
        for segment in segments
        for seed in scale.few_trace_seeds
    )
    return throughput_ratio(runs.pairs(pairs))


def evaluate(runs: Runs, scale: Scale) -> Figure:
    charts, rows = [], []
    for model in models(scale):
        series = []
        for variant in list(VARIANTS)[1:]:
            found = [ratio(runs, scale, model, variant, (segment,)) for segment in SEGMENTS]
            overall = ratio(runs, scale, model, variant, SEGMENTS)
            everywhere = [*found, overall]
            series.append(
                Series(
                    name=variant,
                    values=[mean_of(e) for e in everywhere],
                    errors=[*(None for _ in found), width_of(overall)],
                )
            )
            rows.append([MODELS[model], variant, *(shown(e, 2) for e in everywhere)])
        labels = [*(f"segment {segment}" for segment in SEGMENTS), "all"]
        charts.append(
            Chart(
                title=f"{MODELS[model]}: times PEARL",
                kind="bars",
                labels=labels,
                series=series,
            )
        )
    return Figure(
        name="beyond",
        title="Better than the paper",
        parameters=f"load-bound, two hours, seeds {list(scale.few_trace_seeds)}; ± is the 95 % interval of "
        "pairs of equal segment and seed",
        charts=charts,
        tables=[
            Table(
                header=["model", "variant", *(f"segment {segment}" for segment in SEGMENTS), "all segments"],
                rows=rows,
            )
        ],
        remarks=[
            "The base is the preset pearl: the paper's decisions, strict batches and closed form. Its "
            "routing is cache-aware "
            "already, since a router that keeps a trajectory on one worker for ever is unfit for roles "
            "that change: after "
            "a switch in the middle of a batch the first worker back keeps nearly all of it. The first "
            "row is what that "
            "routing costs.",
            "Early start gains nothing over a system that has it already; both ways to start a batch "
            "keep the staleness "
            "within 1.",
            "The fluid predictor brings no throughput over the closed form here, so that pearl+ is pearl "
            "with early start.",
            "Without roles, early start does as well as with them here: a prefill-decode split has to beat colocated "
            "workers that are routed well, and with these costs it does not by more than the intervals.",
        ],
    )


MODULE = Module("beyond", plan, evaluate)
