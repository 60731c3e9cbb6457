"""``pearl trace inspect``: what a trace would play, before it is played."""

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pearl.cli.output import check_writable, wide_console
from pearl.traces import Trace, at_most, counts, load_trace
from pearl.traces.capacity import moment
from pearl.types.trace import TraceEvent

PLOT_ROWS = 8
BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 960, 240
"""Of the figure in HTML, in pixels."""


class Request(NamedTuple):
    """What the person typed."""

    trace: Path
    speed: float = 1.0
    max_gpus: int | None = None
    gpus_per_node: int = 1
    html: Path | None = None
    as_json: bool = False


def inspect(request: Request) -> int:
    """Print what would be played.

    Raises:
        ValueError: the trace, a number or the file to write are wrong.
    """
    if request.html is not None:
        check_writable("--html", request.html)
    trace = load_trace(request.trace, speed=request.speed, gpus_per_node=request.gpus_per_node)
    if request.max_gpus is not None:
        trace = _capped(trace, request.max_gpus)
    levels = counts(trace.events)
    found = summary(request.trace, trace, levels)
    if request.html is not None:
        request.html.write_text(page(found, levels), encoding="utf-8")
    if request.as_json:
        answer = {**found, "levels": [list(level) for level in levels]}
        print(msgspec.json.encode(answer).decode())
    else:
        _show(found, levels)
    return 0


def _capped(trace: Trace, max_gpus: int) -> Trace:
    most = max((gpus for _, gpus in counts(trace.events)), default=0)
    if most <= max_gpus:
        return trace
    note = f"up to {most} GPUs are recorded; what goes beyond {max_gpus} neither arrives nor is reclaimed"
    return trace._replace(events=at_most(trace.events, max_gpus), notes=[*trace.notes, note])


def summary(path: Path, trace: Trace, levels: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Return the figures of what would be played. Means are over the time from the first event to the last."""
    events = trace.events
    moments = [moment(event) for event in events]
    span = moments[-1] - moments[0] if moments else 0.0
    gpus = [level for _, level in levels]
    held = sum((later - at) * level for (at, level), (later, _) in pairwise(levels))
    covered = levels[-1][0] - levels[0][0] if levels else 0.0
    pauses = [later - earlier for earlier, later in pairwise(moments) if later > earlier]
    return {
        "trace": str(path),
        "format": trace.format,
        "by": "step" if events and events[0].at_step is not None else "time",
        "events": len(events),
        "arrivals": _number(events, "arrive"),
        "reclaims": _number(events, "reclaim"),
        "gpus_arrived": _gpus(events, "arrive"),
        "gpus_reclaimed": _gpus(events, "reclaim"),
        "first": moments[0] if moments else None,
        "last": moments[-1] if moments else None,
        "span": span,
        "min_gpus": min(gpus, default=0),
        "max_gpus": max(gpus, default=0),
        "mean_gpus": held / covered if covered else float(gpus[-1]) if gpus else 0.0,
        "final_gpus": gpus[-1] if gpus else 0,
        "shortest_pause": min(pauses, default=None),
        "longest_pause": max(pauses, default=None),
        "largest_arrival": max((e.num_gpus for e in events if e.action == "arrive"), default=0),
        "largest_reclaim": max((e.num_gpus for e in events if e.action == "reclaim"), default=0),
        "notes": trace.notes,
    }


def _number(events: Sequence[TraceEvent], action: str) -> int:
    return sum(event.action == action for event in events)


def _gpus(events: Sequence[TraceEvent], action: str) -> int:
    return sum(event.num_gpus for event in events if event.action == action)


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as a person reads it."""
    mean = found["mean_gpus"]
    unit = " s" if found["by"] == "time" else " steps"
    rows = [
        ("format", found["format"]),
        ("events", f"{found['events']}, by {found['by']}"),
        ("arrivals", _changes(found, "arrivals", "arrived", "largest_arrival")),
        ("reclaims", _changes(found, "reclaims", "reclaimed", "largest_reclaim")),
        (
            "GPUs",
            f"{found['min_gpus']} to {found['max_gpus']}, mean {mean:.1f}, {found['final_gpus']} at the end",
        ),
    ]
    if found["events"]:
        rows.append(("from, to", f"{found['first']:g}{unit}, {found['last']:g}{unit}{_hours(found)}"))
    if found["shortest_pause"] is not None:
        rows.append(("pauses", f"{found['shortest_pause']:g}{unit} to {found['longest_pause']:g}{unit}"))
    return rows


def _changes(found: dict[str, Any], number: str, gpus: str, largest: str) -> str:
    return f"{found[number]} of {found[f'gpus_{gpus}']} GPU(s), at most {found[largest]} at once"


def _hours(found: dict[str, Any]) -> str:
    return f" ({found['span'] / 3600:.1f} h)" if found["by"] == "time" and found["span"] >= 3600 else ""


def _show(found: dict[str, Any], levels: Sequence[tuple[float, int]]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    console = wide_console()
    table = Table(box=SIMPLE, show_header=False, title=found["trace"], title_justify="left")
    for name, value in rows_of(found):
        table.add_row(name, value)
    console.print(table)
    for line in plot(levels, max(20, min(console.width - 10, 120))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for note in found["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def plot(levels: Sequence[tuple[float, int]], num_columns: int) -> list[str]:
    """Return lines of text: GPUs over time, the most of each column; none when there is no time to plot."""
    if len(levels) < 2 or levels[-1][0] <= levels[0][0]:
        return []
    most = max(gpus for _, gpus in levels)
    columns = _columns(levels, num_columns)
    label = len(str(most))
    lines = []
    for row in reversed(range(PLOT_ROWS)):
        # Filled eighths of this row's cell.
        filled = (math.ceil(gpus / most * PLOT_ROWS * 8 - row * 8) if most else 0 for gpus in columns)
        cells = "".join(BLOCKS[max(0, min(8, eighths))] for eighths in filled)
        name = str(most) if row == PLOT_ROWS - 1 else "0" if row == 0 else ""
        lines.append(f"{name:>{label}} ┤{cells}".rstrip())
    left, right = f"{levels[0][0]:g}", f"{levels[-1][0]:g}"
    lines.append(" " * (label + 2) + left + right.rjust(num_columns - len(left)))
    return lines


def _columns(levels: Sequence[tuple[float, int]], num_columns: int) -> list[int]:
    begin, end = levels[0][0], levels[-1][0]
    found = [0] * num_columns
    for (at, gpus), (later, _) in pairwise([*levels, (end, 0)]):
        first = min(num_columns - 1, int((at - begin) / (end - begin) * num_columns))
        last = min(num_columns - 1, math.ceil((later - begin) / (end - begin) * num_columns) - 1)
        for column in range(first, max(first, last) + 1):
            found[column] = max(found[column], gpus)
    return found


def page(found: dict[str, Any], levels: Sequence[tuple[float, int]]) -> str:
    """Return one static page: the summary and the figure as SVG, without scripts."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows_of(found)
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in found["notes"])
    name = html.escape(found["trace"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        "<style>body{font:14px sans-serif;margin:2em}th{text-align:left;padding-right:1em}"
        "svg{border:1px solid #ccc;margin-top:1em}</style>"
        f"<h1>{name}</h1><table>{rows}</table>{_figure(levels)}<ul>{notes}</ul></html>\n"
    )


def _figure(levels: Sequence[tuple[float, int]]) -> str:
    if len(levels) < 2 or levels[-1][0] <= levels[0][0]:
        return ""
    begin, span = levels[0][0], levels[-1][0] - levels[0][0]
    most = max(1, *(gpus for _, gpus in levels))
    points = []
    before = levels[0][1]
    for at, gpus in levels:
        x = (at - begin) / span * WIDTH
        points += [
            f"{x:.1f},{HEIGHT - before / most * HEIGHT:.1f}",
            f"{x:.1f},{HEIGHT - gpus / most * HEIGHT:.1f}",
        ]
        before = gpus
    return (
        f'<svg viewBox="-60 -20 {WIDTH + 90} {HEIGHT + 50}" width="{WIDTH + 90}" height="{HEIGHT + 50}" '
        f'role="img" aria-label="GPUs over time"><polyline points="{" ".join(points)}" fill="none" '
        f'stroke="#1f77b4" stroke-width="1.5"/><text x="-8" y="5" text-anchor="end">{most} GPUs</text>'
        f'<text x="-8" y="{HEIGHT}" text-anchor="end">0</text><text x="0" y="{HEIGHT + 20}">{begin:g}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 20}" text-anchor="end">{levels[-1][0]:g}</text></svg>'
    )
