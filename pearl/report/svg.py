"""Small plots as SVG text: lines and stacked bars with a legend. Values outside of what is known leave gaps."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 1000, 320
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 44, 46
MAX_POINTS = 2000
"""Of a line: more than there are pixels. Longer ones are drawn with every n-th point."""
LETTER = 7.2  # width of one, roughly


class Series(NamedTuple):
    """``y`` has a None where nothing is known."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False


class Plot(NamedTuple):
    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    kind: str = "lines"  # or "bars", stacked
    log: bool = False


class Frame(NamedTuple):
    """Maps values to places on the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - BOTTOM - TOP)


def draw(plot: Plot) -> str:
    """One <svg> as wide as its place, or "" when there is no value to draw."""
    plot = plot._replace(series=[_thinned(series) for series in plot.series])
    if not any(_points(series, log=plot.log) for series in plot.series):
        return ""
    frame = _frame(plot)
    marks = _bars(plot, frame) if plot.kind == "bars" else "".join(_line(s, frame) for s in plot.series)
    return (
        f'<svg class="plot-svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">'
        f'<text x="8" y="20" class="title">{escape(plot.title)}</text>{_legend(plot)}{_axes(plot, frame)}{marks}</svg>'
    )


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return at most about ``most`` round numbers from ``low`` to ``high``."""
    step = nice_step(high - low, most)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def nice_step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most ``most`` steps fit into ``span``."""
    power: float = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)


def short(value: float) -> str:
    """12000.0 -> "12k"; up to three digits that say something."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.4g}{unit}"
    return f"{value:.4g}"


def _thinned(series: Series) -> Series:
    every = -(-len(series.x) // MAX_POINTS)
    return series._replace(x=series.x[::every], y=series.y[::every]) if every > 1 else series


def _points(series: Series, *, log: bool) -> list[tuple[float, float]]:
    return [
        (x, y)
        for x, y in zip(series.x, series.y, strict=True)
        if y is not None and math.isfinite(y) and (y > 0 or not log)
    ]


def _frame(plot: Plot) -> Frame:
    found = [point for series in plot.series for point in _points(series, log=plot.log)]
    xs = [x for x, _ in found]
    if plot.kind == "bars":
        totals: dict[float, float] = {}
        for x, y in found:
            totals[x] = totals.get(x, 0.0) + y
        # Half a bar on each side, so that the first and the last are whole.
        return Frame(min(xs) - 0.5, max(xs) + 0.5, 0.0, max(totals.values()) * 1.05 or 1.0, log=False)
    x_low, x_high = min(xs), max(xs)
    if x_high <= x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    ys = [y for _, y in found]
    if plot.log:
        low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
        return Frame(x_low, x_high, low, max(high, low + 1), log=True)
    low_y, high_y = min(0.0, *ys), max(0.0, *ys)
    return Frame(
        x_low, x_high, low_y, (high_y - low_y) * 1.05 + low_y if high_y > low_y else low_y + 1, log=False
    )


def _axes(plot: Plot, frame: Frame) -> str:
    parts = []
    values = (
        [10.0**power for power in range(int(frame.y_low), int(frame.y_high) + 1)]
        if frame.log
        else ticks(frame.y_low, frame.y_high, 6)
    )
    for value in values:
        y = frame.y(value)
        style = "zero" if value == 0 else "grid"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="{style}"/>')
        text = f"{value:.0e}" if frame.log else short(value)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="end">{text}</text>')
    bottom = HEIGHT - BOTTOM
    for value in ticks(frame.x_low, frame.x_high, 10):
        if plot.x_title == "step" and value != int(value):
            continue
        parts.append(f'<text x="{frame.x(value):.1f}" y="{bottom + 18}" class="middle">{short(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 38}" class="middle">{escape(plot.x_title)}</text>')
    place = f"translate(16 {(TOP + bottom) / 2}) rotate(-90)"
    parts.append(f'<text transform="{place}" class="middle">{escape(plot.y_title)}</text>')
    return "".join(parts)


def _line(series: Series, frame: Frame) -> str:
    points = [(frame.x(x), frame.y(y), x, y) for x, y in _points(series, log=frame.log)]
    if not points:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in points)
    dash = ' stroke-dasharray="3 4"' if series.dashed else ""
    drawn = f'<path d="M{path}" class="line" stroke="{series.colour}"{dash}/>'
    radius = 5 if series.dashed else 2.5
    if len(points) > 500:  # dots would touch each other
        return drawn
    name = escape(series.name)
    return drawn + "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{series.colour}">'
        f"<title>{name}: {value:.4g} at {at:g}</title></circle>"
        for x, y, at, value in points
    )


def _bars(plot: Plot, frame: Frame) -> str:
    parts: list[str] = []
    tops: dict[float, float] = {}
    width = 0.85 * (frame.x(1.0) - frame.x(0.0))
    for series in plot.series:
        for x, value in _points(series, log=False):
            base = tops.get(x, 0.0)
            tops[x] = base + value
            top, bottom = frame.y(base + value), frame.y(base)
            parts.append(
                f'<rect x="{frame.x(x) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}" fill="{series.colour}">'
                f"<title>{escape(series.name)}: {value:.4g} at {x:g}</title></rect>"
            )
    return "".join(parts)


def _legend(plot: Plot) -> str:
    """Draw the legend at the top right, from right to left; a single series is named by the title."""
    if len(plot.series) < 2:
        return ""
    parts, x = [], float(WIDTH - RIGHT)
    for series in reversed(plot.series):
        x -= LETTER * len(series.name)
        parts.append(f'<text x="{x:.0f}" y="20">{escape(series.name)}</text>')
        x -= 16
        parts.append(f'<rect x="{x:.0f}" y="11" width="11" height="11" fill="{series.colour}"/>')
        x -= 16
    return "".join(parts)
