"""The page: every figure's plots, its table beside the paper, its parameters and what is different. One file."""

from collections.abc import Sequence
from html import escape

from benchmarks.paper.drawing import draw
from benchmarks.paper.figure import Figure, Table

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2128; background: #f4f5f7; margin: 0 auto; padding: 24px;
       max-width: 1120px; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin: 0 0 6px; }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 6px; padding: 14px 18px; margin: 14px 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 12px; }
.parameters { color: #57606a; font-size: 13px; margin: 0 0 10px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; margin: 10px 0; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid #eceef1; vertical-align: top; }
svg { width: 100%; max-width: 600px; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #1c2128; }
svg .title { font-size: 13px; font-weight: 600; } svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: #eceef1; } svg .zero { stroke: #8a8f98; } svg .error { stroke: #1c2128; stroke-width: 1.2; }
svg .line { fill: none; stroke-width: 2; }
"""
INTRODUCTION = (
    "Simulated: the coordinator's own core on a virtual clock, with engines that go request by request. The "
    "duration of "
    "an engine's iteration has the form that the tracker fits, so that a small regret is partly self-agreement. Each "
    "figure names its set of costs, one set a model: load-bound, fitted to the relative fall in Fig. 2(a) alone, or "
    "data sheet, fitted to nothing. One column of Table 2 uses a third set, the shipped profile, which was fitted to "
    "that table. The paper's numbers are those of its text; where that gives a range over bars, the range is shown. "
    "Sentences that compare are computed from the table above them: an interval is above or below the paper's value or "
    "range, or overlaps it."
)


def render(figures: Sequence[Figure]) -> str:
    links = " · ".join(f'<a href="#{f.name}">{escape(f.title.partition(":")[0])}</a>' for f in figures)
    body = "".join(_section(figure) for figure in figures)
    title = "PEARL's evaluation, the paper beside the simulator"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1><p>{INTRODUCTION}</p><p>{links}</p>\n{body}</body></html>\n"
    )


def _section(figure: Figure) -> str:
    charts = "".join(f"<div>{draw(chart)}</div>" for chart in figure.charts)
    tables = "".join(_table(table) for table in figure.tables)
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in figure.remarks)
    return (
        f'<section id="{figure.name}"><h2>{escape(figure.title)}</h2>'
        f'<p class="parameters">{escape(figure.parameters)}</p><div class="charts">{charts}</div>{tables}'
        f"<ul>{remarks}</ul></section>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f'<div class="table"><table><tr>{head}</tr>{rows}</table></div>'
