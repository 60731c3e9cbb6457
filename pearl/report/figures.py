"""The plots. Each returns a plotly figure, or None when the run recorded nothing for it."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from pearl.report import timeline, timeline_events
from pearl.report.run_data import Line, RunData

Figure = Any  # plotly ships no types

BLUE, ORANGE, GREEN, GREY, RED = "#2563a8", "#d97a1e", "#2d8659", "#8a8f98", "#b3261e"
INK = "#1c2128"
MANY_ROWS = 8  # more of them are drawn closer together
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


def reward(run: RunData) -> Figure | None:
    if not run.steps and not run.evaluations:
        return None
    figure = _figure("Reward", "step", "mean reward")
    _line(figure, run.steps, "reward_mean", "sampled, training batch", BLUE)
    figure.add_trace(
        go.Scatter(
            x=[line.get("step") for line in run.evaluations],
            y=[line.get("reward_mean") for line in run.evaluations],
            name="greedy, held-out tasks",
            mode="lines+markers",
            line={"color": ORANGE, "dash": "dot"},
            marker={"size": 10, "symbol": "diamond"},
        )
    )
    return figure.update_yaxes(rangemode="tozero")


def throughput(run: RunData) -> Figure | None:
    if not run.steps:
        return None
    figure = _figure("Throughput", "step", "tokens / s")
    for key, name, colour in (
        ("tokens_generated", "generated", BLUE),
        ("tokens_trained", "trained", GREEN),
    ):
        figure.add_trace(
            go.Bar(
                x=_column(run.steps, "step"),
                y=[_per_second(line, key) for line in run.steps],
                name=name,
                marker_color=colour,
            )
        )
    return figure.update_layout(barmode="stack", bargap=0.15)


def staleness(run: RunData) -> Figure | None:
    keys = ("max_staleness", "mean_staleness", "mean_token_age")
    if not any(line.get(key) is not None for line in run.steps for key in keys):
        return None
    figure = _figure("Staleness", "step", "weight versions")
    for key, colour in zip(keys, (RED, BLUE, ORANGE), strict=True):
        if any(line.get(key) is not None for line in run.steps):
            _line(figure, run.steps, key, key.replace("_", " "), colour)
    return figure.update_yaxes(rangemode="tozero")


def logprob_gap(run: RunData) -> Figure | None:
    """Rollout against training, over tokens made wholly under the trained weights; a step without any is left out."""
    lines = [line for line in run.steps if line.get("max_logprob_gap") and line.get("logprob_gap_tokens", 1)]
    if not lines:
        return None
    figure = _figure("Largest log-prob gap, rollout against training", "step", "|difference|")
    _line(figure, lines, "max_logprob_gap", "max gap", BLUE)
    return figure.update_yaxes(type="log", exponentformat="power", dtick=1).update_layout(showlegend=False)


def makespan(run: RunData) -> Figure | None:
    """Plot each step's rollout time: predicted by the runtime tracker's profile, and measured."""
    lines = [line for line in run.profiles if line.get("measured_s") is not None]
    if not lines:
        return None
    figure = _figure(
        "Makespan of the rollout, predicted and measured", "seconds since the run began", "seconds"
    )
    for key, name, colour in (("predicted_s", "predicted", ORANGE), ("measured_s", "measured", BLUE)):
        _line(figure, lines, key, name, colour, x="time_s")
    return figure.update_yaxes(rangemode="tozero")


def workers(run: RunData) -> Figure | None:
    """Rows of GPUs (of workers, where GPUs are not known): a bar a state, a mark for all that came and went.

    A GPU that is there is a pale band; on it, what training does is wider than what a rollout worker does.
    """
    layers = (
        (timeline.presence_bars(run), 0.9),
        (timeline.training_bars(run), 0.66),
        (timeline.bars(run), 0.42),
    )
    if not any(bars for bars, _ in layers):
        return None
    figure = _figure("Timeline", "seconds since the run began", "")
    for bars, width in layers:
        for state in dict.fromkeys(bar.state for bar in bars):
            _state_trace(figure, [bar for bar in bars if bar.state == state], state, width)
    for happened, name, symbol, colour in _events(run):
        _marks(figure, happened, name, symbol, colour)
    names = timeline.rows(run)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], automargin=True)
    return figure.update_layout(
        barmode="overlay", height=220 + (40 if len(names) <= MANY_ROWS else 26) * len(names)
    )


def _events(run: RunData) -> tuple[tuple[Sequence[timeline_events.TimelineEvent], str, str, str], ...]:
    return (
        (timeline_events.version_changes(run), "new weight version", "line-ns-open", INK),
        (timeline_events.publications(run), "version published", "diamond-tall", INK),
        (timeline_events.handoffs(run, "borrow"), "training GPUs lent", "arrow-up", BLUE),
        (timeline_events.handoffs(run, "return"), "training GPUs returned", "arrow-down", GREEN),
        (timeline_events.capacity_changes(run, "arrived"), "GPU arrived", "triangle-right", GREEN),
        (timeline_events.capacity_changes(run, "reclaimed"), "GPU reclaimed", "triangle-left", ORANGE),
        (timeline_events.capacity_changes(run, "returned"), "GPU given back", "triangle-left-open", ORANGE),
        (timeline_events.capacity_changes(run, "lost"), "GPU lost", "triangle-left", RED),
        (timeline_events.stops(run), "stopped", "x-thin-open", GREY),
        (timeline_events.losses(run), "lost", "x", RED),
    )


def _state_trace(figure: Figure, bars: Sequence[timeline.Bar], state: str, width: float) -> None:
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=[bar.row for bar in bars],
            x=[bar.end_s - bar.start_s for bar in bars],
            base=[bar.start_s for bar in bars],
            customdata=[(bar.start_s, bar.end_s, bar.version or "-", bar.detail) for bar in bars],
            hovertemplate="%{customdata[0]:.2f} to %{customdata[1]:.2f} s<br>version %{customdata[2]}"
            "<br>%{customdata[3]}<extra>" + state + "</extra>",
            name=state,
            marker={"color": STATE_COLOURS.get(state, GREY), "line": {"width": 0}},
            width=width,
        )
    )


def _marks(
    figure: Figure, happened: Sequence[timeline_events.TimelineEvent], name: str, symbol: str, colour: str
) -> None:
    if happened:
        figure.add_trace(
            go.Scatter(
                x=[mark.time_s for mark in happened],
                y=[mark.row for mark in happened],
                text=[mark.label for mark in happened],
                hovertemplate="%{x:.2f} s: %{text}<extra>" + name + "</extra>",
                name=name,
                mode="markers",
                marker={"symbol": symbol, "size": 12, "color": colour, "line": {"width": 2, "color": colour}},
            )
        )


def _figure(title: str, x: str, y: str) -> Figure:
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 16}, "y": 0.97, "yanchor": "top"},
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": y}},
        template="plotly_white",
        height=340,
        margin={"l": 70, "r": 20, "t": 70, "b": 50},
        legend={
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 1,
            "xanchor": "right",
            "traceorder": "normal",
        },
        font={"family": "system-ui, sans-serif"},
    )
    return figure


def _line(figure: Figure, lines: Sequence[Line], key: str, name: str, colour: str, x: str = "step") -> None:
    figure.add_trace(
        go.Scatter(
            x=_column(lines, x),
            y=_column(lines, key),
            name=name,
            mode="lines+markers",
            line={"color": colour},
            marker={"size": 4},
        )
    )


def _column(lines: Sequence[Line], key: str) -> list[Any]:
    return [line.get(key) for line in lines]


def _per_second(line: Line, key: str) -> float | None:
    seconds, tokens = line.get("seconds"), line.get(key)
    return tokens / seconds if seconds and tokens is not None else None
