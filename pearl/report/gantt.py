"""The timeline as HTML and SVG: rows of bars and marks over time, which a slider makes wider.

Places are percent of the drawing's width, so that it can be widened without stretching text and marks.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from pearl.report.svg import ticks
from pearl.report.timeline import Bar
from pearl.report.timeline_events import TimelineEvent

ROW, AXIS = 34, 30  # pixels
MAX_BARS = 1500
"""Of a row: shorter ones are merged into the longest among them beyond this."""
MAX_MARKS = 300
"""Of a kind and row; beyond, every n-th is drawn."""
SHAPES = {
    "line": "M0 -13V13",
    "diamond": "M0 -9L5 0L0 9L-5 0Z",
    "up": "M0 -8L6 4H-6Z",
    "down": "M0 8L6 -4H-6Z",
    "right": "M7 0L-4 6V-6Z",
    "left": "M-7 0L4 6V-6Z",
    "cross": "M-5 -5L5 5M-5 5L5 -5",
}
SCRIPT = (
    "document.querySelectorAll('.zoom').forEach(z=>z.addEventListener('input',()=>"
    "z.closest('.plot').querySelector('.wide').style.width=z.value+'%'))"
)


class Layer(NamedTuple):
    bars: Sequence[Bar]
    height: float  # of a row's


class Kind(NamedTuple):
    """Marks of one kind."""

    marks: Sequence[TimelineEvent]
    name: str
    shape: str
    colour: str


def draw(
    rows: Sequence[str], layers: Sequence[Layer], kinds: Sequence[Kind], end_s: float, colours: dict[str, str]
) -> str:
    """Title, legend, labels, and the drawing, which scrolls when it is widened."""
    place = {row: index for index, row in enumerate(rows)}
    height = ROW * len(rows) + AXIS
    span = max(end_s, 1e-9)
    parts = [_axis(len(rows), span)]
    for layer in layers:
        parts += [_bar(bar, place[bar.row], layer.height, span, colours) for bar in _merged(layer.bars)]
    for kind in kinds:
        parts += [_mark(mark, place[mark.row], span, kind) for mark in _thinned(kind.marks)]
    labels = "".join(f'<div title="{escape(row)}">{escape(row)}</div>' for row in rows)
    return (
        '<div class="head"><b>Timeline</b><label>zoom '
        '<input class="zoom" type="range" min="100" max="3000" value="100"></label></div>'
        f"{_legend(layers, kinds, colours)}"
        f'<div class="gantt"><div class="rows">{labels}</div><div class="scroll">'
        f'<svg class="wide" height="{height}" role="img" aria-label="Timeline">{"".join(parts)}</svg></div></div>'
    )


def _merged(bars: Sequence[Bar]) -> list[Bar]:
    """Neighbours of a row as one, where a row has more than can be seen."""
    by_row: dict[str, list[Bar]] = {}
    for bar in bars:
        by_row.setdefault(bar.row, []).append(bar)
    found: list[Bar] = []
    for row in by_row.values():
        every = -(-len(row) // MAX_BARS)
        for start in range(0, len(row), every):
            some = row[start : start + every]
            longest = max(some, key=lambda bar: bar.end_s - bar.start_s)
            found.append(longest._replace(start_s=some[0].start_s, end_s=some[-1].end_s))
    return found


def _thinned(marks: Sequence[TimelineEvent]) -> Iterable[TimelineEvent]:
    return marks[:: max(1, -(-len(marks) // (MAX_MARKS * max(1, len({mark.row for mark in marks})))))]


def _bar(bar: Bar, row: int, height: float, span: float, colours: dict[str, str]) -> str:
    top = ROW * (row + (1 - height) / 2)
    said = f"{bar.state}, {bar.start_s:.2f} to {bar.end_s:.2f} s"
    said += f"\nversion {bar.version}" if bar.version else ""
    said += f"\n{bar.detail}" if bar.detail else ""
    left, width = 100 * bar.start_s / span, 100 * (bar.end_s - bar.start_s) / span
    return (
        f'<rect x="{left:.3f}%" y="{top:.1f}" width="{width:.3f}%" '
        f'height="{ROW * height:.1f}" fill="{colours.get(bar.state, "#8a8f98")}"><title>{escape(said)}</title></rect>'
    )


def _mark(mark: TimelineEvent, row: int, span: float, kind: Kind) -> str:
    return (
        f'<svg x="{100 * mark.time_s / span:.3f}%" y="{ROW * (row + 0.5):.1f}" class="mark">'
        f'<path d="{SHAPES[kind.shape]}" fill="{kind.colour}" stroke="{kind.colour}">'
        f"<title>{mark.time_s:.2f} s: {escape(kind.name)}: {escape(mark.label)}</title></path></svg>"
    )


def _axis(rows: int, span: float) -> str:
    bottom = ROW * rows
    parts = [
        f'<line x1="0" x2="100%" y1="{ROW * row}" y2="{ROW * row}" class="grid"/>' for row in range(rows + 1)
    ]
    for value in ticks(0.0, span, 10):
        x = 100 * value / span
        anchor = "start" if x < 2 else "end" if x > 98 else "middle"
        parts.append(f'<line x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{x:.3f}%" y="{bottom + 18}" text-anchor="{anchor}">{value:g} s</text>')
    return "".join(parts)


def _legend(layers: Sequence[Layer], kinds: Sequence[Kind], colours: dict[str, str]) -> str:
    states = dict.fromkeys(bar.state for layer in layers for bar in layer.bars)
    found = "".join(
        f'<span><i style="background:{colours.get(state, "#8a8f98")}"></i>{escape(state)}</span>'
        for state in states
    )
    for kind in kinds:
        if kind.marks:
            shape = f'<path d="{SHAPES[kind.shape]}" fill="{kind.colour}" stroke="{kind.colour}"/>'
            found += f'<span><svg class="key" viewBox="-12 -13 24 26">{shape}</svg>{escape(kind.name)}</span>'
    return f'<div class="legend">{found}</div>'
