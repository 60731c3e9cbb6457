"""Fig. 5: throughput under the traces; Fig. 6 takes its curves from the same runs."""

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
    throughput_ratio,
    width_of,
)
from benchmarks.paper.runner import MODELS, Run, Runs

POLICIES = ("roll", "roll-large", "rlboost+", "pearl")
SPREAD = "rlboost+, cache-aware"
"""A stronger RLBoost+: trajectories move to workers that have come, turn by turn."""
SEGMENTS = (1, 2, 3)


SHEET_POLICIES = ("roll", "rlboost+", "pearl")


def sheet_run(segment: int, policy: str) -> Run:
    """With data-sheet costs, one seed of the smaller model: how much depends on the load."""
    return Run(policy=policy, segment=segment, seed=0, load_bound=False)


def run_of(model: str, segment: int, policy: str, seed: int) -> Run:
    if policy == SPREAD:
        settings = ("rollout.router=cache-aware",)
        return Run(policy="rlboost+", overrides=settings, model=model, segment=segment, seed=seed)
    return Run(policy=policy, model=model, segment=segment, seed=seed)


def seeds(scale: Scale, model: str) -> range:
    return scale.trace_seeds if model == "8b" else scale.few_trace_seeds


def plan(scale: Scale) -> list[Run]:
    return [
        run_of(model, segment, policy, seed)
        for model in MODELS
        for seed in seeds(scale, model)
        for segment in SEGMENTS
        for policy in (*POLICIES, SPREAD)
    ] + [sheet_run(segment, policy) for segment in SEGMENTS for policy in SHEET_POLICIES]


def _sheet_rows(runs: Runs) -> list[list[str]]:
    def over(segment: int, base: str) -> str:
        pair = runs.pairs([(sheet_run(segment, "pearl"), sheet_run(segment, base))])
        found = throughput_ratio(pair)
        return f"{shown(found and found.percent(), 0)} %"

    return [[str(segment), over(segment, "roll"), over(segment, "rlboost+")] for segment in SEGMENTS]


def ratio(
    runs: Runs, scale: Scale, model: str, segments: tuple[int, ...], policy: str, base: str
) -> Estimate | None:
    """Over the pairs of equal segment and seed."""
    pairs = (
        (run_of(model, segment, policy, s), run_of(model, segment, base, s))
        for segment in segments
        for s in seeds(scale, model)
    )
    return throughput_ratio(runs.pairs(pairs))


def _mean_throughput(runs: Runs, scale: Scale, model: str, segment: int, policy: str) -> Estimate | None:
    found = runs.of(run_of(model, segment, policy, seed) for seed in seeds(scale, model))
    return estimate([outcome.result.throughput_tokens_per_s for outcome in found])


def _chart(runs: Runs, scale: Scale, model: str) -> Chart:
    series = []
    for policy in (*POLICIES, SPREAD):
        found = [_mean_throughput(runs, scale, model, segment, policy) for segment in SEGMENTS]
        series.append(
            Series(name=policy, values=[mean_of(e) for e in found], errors=[width_of(e) for e in found])
        )
    labels = [f"segment {segment}" for segment in SEGMENTS]
    return Chart(title=MODELS[model], kind="bars", labels=labels, series=series, y_title="tokens/s")


def _rows(runs: Runs, scale: Scale, model: str) -> list[list[str]]:
    rows = []
    for name, segments in (*((str(s), (s,)) for s in SEGMENTS), ("all", SEGMENTS)):
        over = ratio(runs, scale, model, segments, "pearl", "rlboost+")
        spread = ratio(runs, scale, model, segments, "pearl", SPREAD)
        rolls = [ratio(runs, scale, model, segments, policy, "roll") for policy in POLICIES[1:]]
        said = published.OVER_RLBOOST[model]
        rows.append(
            [
                MODELS[model],
                name,
                *(shown(found, 2) for found in rolls),
                published.OVER_ROLL[model].text if name == "all" else "",
                f"{shown(over and over.percent(), 0)} %",
                f"{said[segments[0]].text} %" if len(segments) == 1 else "",
                f"{shown(spread and spread.percent(), 0)} %",
            ]
        )
    return rows


def evaluate(runs: Runs, scale: Scale) -> Figure:
    return Figure(
        name="fig5",
        title="Fig. 5: throughput under changing resources",
        parameters=f"load-bound, two hours, seeds {list(scale.trace_seeds)}, of the larger model "
        f"{list(scale.few_trace_seeds)}, whole steps; strict batches; "
        "ROLL, ROLL-Large and "
        "RLBoost+ keep each trajectory on one worker; ± is the 95 % interval of pairs of equal seed",
        charts=[_chart(runs, scale, model) for model in MODELS],
        tables=[
            Table(
                header=[
                    "model",
                    "segment",
                    "roll-large / roll",
                    "rlboost+ / roll",
                    "pearl / roll",
                    "paper (over segments)",
                    "pearl over rlboost+",
                    "paper",
                    "over rlboost+ with cache-aware routing",
                ],
                rows=[row for model in MODELS for row in _rows(runs, scale, model)],
            ),
            Table(
                header=["segment (data sheet, Qwen3-8B, seed 0)", "pearl over roll", "pearl over rlboost+"],
                rows=_sheet_rows(runs),
            ),
        ],
        remarks=[
            "In strict batches with each trajectory on one worker, GPUs that come in the middle of a batch are "
            "of use to "
            "RLBoost+ from the next one on. The paper does not say how its RLBoost+ routes: the last column has "
            "it with "
            "cache-aware routing, beside which PEARL's borrowing of 8 workers remains.",
            "The fixed part of an iteration is one constant here, also for the larger model, whose experts make "
            "it grow "
            "with the sequences in it on real GPUs: more workers may pay more there than the table shows.",
            "ROLL ends about 5 steps in two hours, and only whole ones count: a large part of the intervals.",
        ],
    )


MODULE = Module("fig5", plan, evaluate)
