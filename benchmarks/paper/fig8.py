"""Fig. 8: batch size and maximum trajectory length, PEARL against RLBoost+ with 8 rollout GPUs."""

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
    throughput,
    width_of,
)
from benchmarks.paper.runner import Run, Runs, fixed

BATCHES = (32, 64, 96, 128)
LENGTHS = (8, 16, 24, 32)  # thousand tokens
POLICIES = ("rlboost+", "pearl")


def run_of(policy: str, batch: int, length: int, seed: int, scale: Scale) -> Run:
    settings = [f"data.batch_size={batch}", f"rollout.max_context_tokens={length * 1024}"]
    if length <= 16:
        settings.append(f"rollout.max_new_tokens_per_turn={length * 512}")  # must leave room for a prompt
    return fixed(policy, 4, scale.steps, *settings, seed=seed)


def points(part: str) -> list[tuple[int, int]]:
    return [(b, 32) for b in BATCHES] if part == "a" else [(64, length) for length in LENGTHS]


def plan(scale: Scale) -> list[Run]:
    return [
        run_of(policy, batch, length, seed, scale)
        for seed in scale.seeds
        for batch, length in (*points("a"), *points("b"))
        for policy in POLICIES
    ]


def gain(runs: Runs, scale: Scale, batch: int, length: int) -> Estimate | None:
    """Over RLBoost+, percent."""
    pairs = (
        (run_of("pearl", batch, length, s, scale), run_of("rlboost+", batch, length, s, scale))
        for s in scale.seeds
    )
    found = step_ratio(runs.pairs(pairs))
    return found and found.percent()


def _throughput(runs: Runs, scale: Scale, policy: str, point: tuple[int, int]) -> Estimate | None:
    found = runs.of(run_of(policy, *point, seed, scale) for seed in scale.seeds)
    return estimate([throughput(outcome) for outcome in found])


def _figure(part: str, runs: Runs, scale: Scale, title: str, unit: str, remarks: list[str]) -> Figure:
    at = points(part)
    labels = [str(batch if part == "a" else f"{length}K") for batch, length in at]
    series = []
    for policy in POLICIES:
        found = [_throughput(runs, scale, policy, point) for point in at]
        series.append(
            Series(name=policy, values=[mean_of(e) for e in found], errors=[width_of(e) for e in found])
        )
    gains = [gain(runs, scale, *point) for point in at]
    said = published.BATCH_GAIN if part == "a" else published.LENGTH_GAIN
    rows = [
        [label, f"{shown(found)} %", f"{said.text} %"] for label, found in zip(labels, gains, strict=True)
    ]
    return Figure(
        name=f"fig8{part}",
        title=title,
        parameters=f"load-bound, Qwen3-8B, 16 training and 8 rollout GPUs, seeds {list(scale.seeds)}, "
        f"batches 2 to {scale.steps}",
        charts=[
            Chart(
                title="throughput",
                kind="bars",
                labels=labels,
                series=series,
                x_title=unit,
                y_title="tokens/s",
            )
        ],
        tables=[Table(header=[unit, "pearl over rlboost+", "paper (range over the bars)"], rows=rows)],
        remarks=remarks,
    )


def evaluate_batches(runs: Runs, scale: Scale) -> Figure:
    cause = (
        "In the model a larger batch only shares the longest trajectory's time among more; the paper's fall beyond "
        "its peaks, for which it names no cause, has no counterpart."
    )
    return _figure("a", runs, scale, "Fig. 8(a): batch size", "batch size", [cause])


def evaluate_lengths(runs: Runs, scale: Scale) -> Figure:
    remarks = [
        "A trajectory that reaches the limit ends there, so that a short limit makes short batches, of which "
        "environments and training are a larger part: more workers shorten neither.",
    ]
    return _figure("b", runs, scale, "Fig. 8(b): maximum trajectory length", "tokens", remarks)


BATCH_MODULE = Module("fig8a", plan, evaluate_batches)
LENGTH_MODULE = Module("fig8b", plan, evaluate_lengths)
