"""The plots. Each returns HTML, or "" when the run recorded nothing for it."""

from collections.abc import Sequence
from typing import Any

from pearl.report import gantt, svg, timeline, timeline_events
from pearl.report.run_data import Line, RunData
from pearl.report.svg import Plot, Series

BLUE, ORANGE, GREEN, GREY, RED = "#2563a8", "#d97a1e", "#2d8659", "#8a8f98", "#b3261e"
INK = "#1c2128"
STATE_COLOURS = {
    "GPU there": "#eef4ea",
    "GPU reclaimed": "#fbe3d0",
    "starting": "#c9ced6",
    "waiting for weights": "#dfe3e8",
    "waiting for the others": "#cdd9e8",
    "updating": "#e9b64a",
    "activating": "#f0cf86",
    "releasing": "#d9a5a0",
    "leaving": "#d9a5a0",
    "stopping": "#d9b3af",
    "transitioning": "#e9b64a",
    "training starting": "#c9ced6",
    "training idle": "#d5e6dc",
    "training": GREEN,
    "offloading": "#a3c9b2",
    "restoring": "#a3c9b2",
    "lent": "#f3efe2",
    "active (colocated)": BLUE,
    "active (prefill)": "#7b52ab",
    "active (decode)": "#2a9d9d",
}


def reward(run: RunData) -> str:
    sampled = _series(run.steps, "reward_mean", "sampled, training batch", BLUE)
    greedy = _series(run.evaluations, "reward_mean", "greedy, held-out tasks", ORANGE)
    return svg.draw(Plot("Reward", "step", "mean reward", [sampled, greedy._replace(dashed=True)]))


def throughput(run: RunData) -> str:
    series = [
        Series(name, colour, _column(run.steps, "step"), [_per_second(line, key) for line in run.steps])
        for key, name, colour in (
            ("tokens_generated", "generated", BLUE),
            ("tokens_trained", "trained", GREEN),
        )
    ]
    return svg.draw(Plot("Throughput", "step", "tokens / s", series, "bars"))


def staleness(run: RunData) -> str:
    keys = ("max_staleness", "mean_staleness", "mean_token_age")
    series = [
        _series(run.steps, key, key.replace("_", " "), colour)
        for key, colour in zip(keys, (RED, BLUE, ORANGE), strict=True)
        if any(line.get(key) is not None for line in run.steps)
    ]
    return svg.draw(Plot("Staleness", "step", "weight versions", series))


def logprob_gap(run: RunData) -> str:
    """Rollout against training, over tokens made wholly under the trained weights; a step without any is left out."""
    lines = [line for line in run.steps if line.get("max_logprob_gap") and line.get("logprob_gap_tokens", 1)]
    series = [_series(lines, "max_logprob_gap", "max gap", BLUE)]
    title = "Largest log-prob gap, rollout against training"
    return svg.draw(Plot(title, "step", "|difference|", series, log=True))


def makespan(run: RunData) -> str:
    """Plot each step's rollout time: predicted by the runtime tracker's profile, and measured."""
    lines = [line for line in run.profiles if line.get("measured_s") is not None]
    series = [
        _series(lines, key, name, colour, x="time_s")
        for key, name, colour in (("predicted_s", "predicted", ORANGE), ("measured_s", "measured", BLUE))
    ]
    title = "Makespan of the rollout, predicted and measured"
    return svg.draw(Plot(title, "seconds since the run began", "seconds", series))


def workers(run: RunData) -> str:
    """Rows of GPUs (of workers, where GPUs are not known): a bar a state, a mark for all that came and went.

    A GPU that is there is a pale band; on it, what training does is wider than what a rollout worker does.
    """
    layers = [
        gantt.Layer(timeline.presence_bars(run), 0.94),
        gantt.Layer(timeline.training_bars(run), 0.66),
        gantt.Layer(timeline.bars(run), 0.42),
    ]
    if not any(layer.bars for layer in layers):
        return ""
    return gantt.draw(timeline.rows(run), layers, _events(run), run.end_s, STATE_COLOURS)


def _events(run: RunData) -> list[gantt.Kind]:
    return [
        gantt.Kind(timeline_events.version_changes(run), "new weight version", "line", INK),
        gantt.Kind(timeline_events.publications(run), "version published", "diamond", INK),
        gantt.Kind(timeline_events.handoffs(run, "borrow"), "training GPUs lent", "up", BLUE),
        gantt.Kind(timeline_events.handoffs(run, "return"), "training GPUs returned", "down", GREEN),
        gantt.Kind(timeline_events.capacity_changes(run, "arrived"), "GPU arrived", "right", GREEN),
        gantt.Kind(timeline_events.capacity_changes(run, "reclaimed"), "GPU reclaimed", "left", ORANGE),
        gantt.Kind(timeline_events.capacity_changes(run, "returned"), "GPU given back", "left", GREY),
        gantt.Kind(timeline_events.capacity_changes(run, "lost"), "GPU lost", "left", RED),
        gantt.Kind(timeline_events.stops(run), "stopped", "cross", GREY),
        gantt.Kind(timeline_events.losses(run), "lost", "cross", RED),
    ]


def _series(lines: Sequence[Line], key: str, name: str, colour: str, x: str = "step") -> Series:
    there = [line for line in lines if isinstance(line.get(x), int | float)]
    return Series(name, colour, _column(there, x), [_number(line.get(key)) for line in there])


def _column(lines: Sequence[Line], key: str) -> list[Any]:
    return [line.get(key) for line in lines]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _per_second(line: Line, key: str) -> float | None:
    seconds, tokens = line.get("seconds"), line.get(key)
    return tokens / seconds if seconds and tokens is not None else None
