"""Small plots as SVG: bars with intervals, lines, steps. No library, so that the page is small and opens offline."""

import math
from html import escape
from typing import NamedTuple

from benchmarks.paper.figure import Chart, Series

COLOURS = ("#2563a8", "#d97a1e", "#2d8659", "#7b52ab", "#b3261e", "#2a9d9d", "#8a6d3b")
PAPER_COLOUR = "#8a8f98"
WIDTH, HEIGHT = 520, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44
LEGEND_ROW = 16
LETTER_WIDTH = 6.2  # of the legend's text, roughly


class Frame(NamedTuple):
    """Where values lie on the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        bottom = self.height - BOTTOM
        return bottom - (value - self.y_low) / (self.y_high - self.y_low) * (bottom - TOP)


def draw(chart: Chart) -> str:
    """One <svg>."""
    legend, rows = _legend(chart)
    frame = _frame(chart, HEIGHT + rows * LEGEND_ROW)
    marks = _bars(chart, frame) if chart.kind == "bars" else _lines(chart, frame)
    shift = f'<g transform="translate(0 {HEIGHT})">{legend}</g>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {frame.height}" role="img" aria-label="{escape(chart.title)}">'
        f'<text x="{LEFT}" y="16" class="title">{escape(chart.title)}</text>'
        f"{_axes(chart, frame._replace(height=HEIGHT))}{marks}{shift}</svg>"
    )


def _frame(chart: Chart, height: int) -> Frame:
    values = [v for s in chart.series for v in s.values if v is not None]
    spreads = [
        side
        for s in chart.series
        for v, e in zip(s.values, s.errors, strict=False)
        if v is not None and e is not None
        for side in (v - e, v + e)
    ]
    usual = max(map(abs, values), default=1.0)
    spreads = [
        min(max(side, -0.6 * usual), 1.6 * usual) for side in spreads
    ]  # one wild interval may not flatten all
    low, high = min([0.0, *values, *spreads]), max([*values, *spreads], default=1.0)
    if high <= low:
        high = low + 1.0
    xs = [x for s in chart.series for x in s.x]
    if xs and chart.kind != "bars":
        return Frame(min(xs), max(max(xs), min(xs) + 1e-9), low, high * 1.05, height)
    return Frame(-0.5, max(1, len(chart.labels)) - 0.5, low, high * 1.05, height)


def nice_step(span: float, most: int = 6) -> float:
    """1, 2 or 5 times a power of ten, so that at most ``most`` steps fit in."""
    power: float = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)


def _axes(chart: Chart, frame: Frame) -> str:
    parts = []
    step = nice_step(frame.y_high - frame.y_low)
    tick = math.ceil(frame.y_low / step) * step
    while tick <= frame.y_high:
        y = frame.y(tick)
        style = "zero" if abs(tick) < step / 100 else "grid"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="{style}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{tick:g}</text>')
        tick = round(tick / step + 1) * step
    bottom = frame.height - BOTTOM
    for x, text in _x_ticks(chart, frame):
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="middle">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 34}" class="middle">{escape(chart.x_title)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="16" class="end">{escape(chart.y_title)}</text>')
    return "".join(parts)


def _x_ticks(chart: Chart, frame: Frame) -> list[tuple[float, str]]:
    if chart.labels:
        return [(frame.x(index), label) for index, label in enumerate(chart.labels)]
    step = nice_step(frame.x_high - frame.x_low)
    first, last = math.ceil(frame.x_low / step), math.floor(frame.x_high / step)
    return [(frame.x(i * step), f"{i * step:g}") for i in range(first, last + 1)]


def colour_of(chart: Chart, series: Series) -> str:
    if series.paper:
        return PAPER_COLOUR
    return COLOURS[chart.series.index(series) % len(COLOURS)]


def _bars(chart: Chart, frame: Frame) -> str:
    frame = frame._replace(height=HEIGHT)
    parts, width = [], 0.8 / max(1, len(chart.series))
    for place, series in enumerate(chart.series):
        colour = colour_of(chart, series)
        for index, value in enumerate(series.values):
            if value is None:
                continue
            left = frame.x(index - 0.4 + place * width)
            right = frame.x(index - 0.4 + (place + 0.92) * width)
            top, bottom = sorted((frame.y(value), frame.y(max(0.0, frame.y_low))))
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
                f'fill="{colour}"><title>{escape(series.name)}: {value:.4g}</title></rect>'
            )
            error = series.errors[index] if index < len(series.errors) else None
            if error:
                parts.append(_whisker(frame, (left + right) / 2, value, error))
    return "".join(parts)


def _whisker(frame: Frame, x: float, value: float, error: float) -> str:
    low, high = frame.y(max(frame.y_low, value - error)), frame.y(min(frame.y_high, value + error))
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" class="error"/>'


def _lines(chart: Chart, frame: Frame) -> str:
    frame = frame._replace(height=HEIGHT)
    parts = []
    for series in chart.series:
        xs = series.x or [float(index) for index in range(len(series.values))]
        points = [(frame.x(x), frame.y(v)) for x, v in zip(xs, series.values, strict=True) if v is not None]
        if not points:
            continue
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for x, y in points[1:]:
            path += f"H{x:.1f}V{y:.1f}" if chart.kind == "steps" else f"L{x:.1f} {y:.1f}"
        dash = ' stroke-dasharray="5 4"' if series.paper else ""
        colour = colour_of(chart, series)
        parts.append(
            f'<path d="{path}" stroke="{colour}" class="line"{dash}><title>{escape(series.name)}</title></path>'
        )
        if chart.kind == "lines":
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return "".join(parts)


def _legend(chart: Chart) -> tuple[str, int]:
    """Below the plot, and its number of rows."""
    parts, x, row = [], float(LEFT), 0
    for series in chart.series:
        needed = 24 + LETTER_WIDTH * len(series.name)
        if x > LEFT and x + needed > WIDTH - RIGHT:
            x, row = float(LEFT), row + 1
        y = row * LEGEND_ROW
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="10" height="10" fill="{colour_of(chart, series)}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="{y + 9}">{escape(series.name)}</text>')
        x += needed
    return "".join(parts), row + 1 if chart.series else 0
