"""Fig. 2(c): colocation against prefill-decode ratios over batch sizes, Qwen3-30B-A3B with 8 workers."""

from benchmarks.paper import published
from benchmarks.paper.figure import Chart, Estimate, Figure, Module, Scale, Series, Table, shown, step_ratio
from benchmarks.paper.runner import Run, Runs, fixed

BATCHES = (32, 48, 64, 80, 96)
COLOCATED, SPREAD = "colocated", "colocated, cache-aware"


def ratios(scale: Scale) -> tuple[str, ...]:
    return ("2P6D", "3P5D", "4P4D", "5P3D", "6P2D") if scale.full else ("3P5D", "4P4D", "5P3D")


def run_of(kind: str, batch: int, seed: int, scale: Scale) -> Run:
    extra = {COLOCATED: (), SPREAD: ("rollout.router=cache-aware",)}.get(kind, (f"elastic.pd={kind}",))
    return fixed("roll", 8, scale.steps, f"data.batch_size={batch}", *extra, model="30b", seed=seed)


def kinds(scale: Scale) -> tuple[str, ...]:
    return (COLOCATED, SPREAD, *ratios(scale))


def plan(scale: Scale) -> list[Run]:
    seeds = scale.seeds if scale.full else [0]
    return [run_of(kind, batch, seed, scale) for seed in seeds for batch in BATCHES for kind in kinds(scale)]


def gain(runs: Runs, scale: Scale, kind: str, batch: int) -> Estimate | None:
    """Over colocation, percent."""
    pairs = ((run_of(kind, batch, s, scale), run_of(COLOCATED, batch, s, scale)) for s in scale.seeds)
    found = step_ratio(runs.pairs(pairs))
    return found and found.percent()


def evaluate(runs: Runs, scale: Scale) -> Figure:
    gains = {kind: [gain(runs, scale, kind, batch) for batch in BATCHES] for kind in kinds(scale)[1:]}
    series = [
        Series(name=kind, values=[e and e.mean for e in found], errors=[e and e.half_width for e in found])
        for kind, found in gains.items()
    ]
    said = [published.DISAGGREGATION_GAIN.get(batch) for batch in BATCHES]
    series.append(Series(name="paper, best ratio", values=[s and s.low for s in said], paper=True))
    rows = []
    for index, batch in enumerate(BATCHES):
        splits = [(found[index], kind) for kind, found in gains.items() if kind != SPREAD]
        best = max(((e, kind) for e, kind in splits if e), key=lambda pair: pair[0].mean, default=None)
        paper = said[index]
        rows.append(
            [
                str(batch),
                best[1] if best else "-",
                published.BEST_RATIO.get(batch, "not said"),
                f"{shown(best[0])} %" if best else "-",
                f"{paper.text} %" if paper else "not said",
                f"{shown(gains[SPREAD][index])} %",
            ]
        )
    return Figure(
        name="fig2c",
        title="Fig. 2(c): prefill-decode ratios and batch size, Qwen3-30B-A3B, 8 workers",
        parameters=f"load-bound, fixed pool, batches 2 to {scale.steps} of each run; colocated: each trajectory on one "
        "worker for ever (as ROLL), which all gains are over",
        charts=[
            Chart(
                title="throughput over colocation",
                kind="lines",
                labels=[str(batch) for batch in BATCHES],
                series=series,
                x_title="batch size",
                y_title="%",
            )
        ],
        tables=[
            Table(
                header=[
                    "batch",
                    "best ratio",
                    "paper",
                    "its gain",
                    "paper's gain",
                    "cache-aware colocation's gain",
                ],
                rows=rows,
            )
        ],
        remarks=[
            "The load-bound set was not fitted to this figure.",
            "Cache-aware routing of colocated workers is the baseline that a prefill-decode split must beat to "
            "be worth "
            "its trouble; the paper does not show it.",
        ],
    )


MODULE = Module("fig2c", plan, evaluate)
