"""The HTML around the plots. Everything is inline: the file can be mailed and opened offline."""

from collections.abc import Sequence
from html import escape

from pearl.report.gantt import SCRIPT

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2128; background: #f4f5f7; margin: 0 auto; padding: 24px;
       max-width: 1100px; }
h1 { font-size: 22px; margin: 0 0 16px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: 12px; }
.tile, .plot, details { background: #fff; border: 1px solid #dfe3e8; border-radius: 6px; }
.tile { padding: 10px 14px; }
.tile b { display: block; font-size: 18px; font-weight: 600; white-space: nowrap; }
.tile span { color: #57606a; font-size: 13px; }
.plot { margin-top: 14px; padding: 6px; }
.remark { background: #fdf3d8; border: 1px solid #e9d59a; border-radius: 6px; padding: 8px 14px; }
details { margin-top: 14px; padding: 10px 14px; }
summary { cursor: pointer; font-weight: 600; }
table { border-collapse: collapse; margin-top: 8px; }
td, th { text-align: left; padding: 3px 24px 3px 0; border-bottom: 1px solid #eceef1; }
td:last-child { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
svg text { font-size: 13px; fill: #1c2128; }
svg .title { font-size: 16px; }
svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .grid { stroke: #e4e8ee; }
svg .zero { stroke: #8a8f98; }
svg .line { fill: none; stroke-width: 2; }
.plot-svg { display: block; width: 100%; }
.head { display: flex; justify-content: space-between; padding: 4px 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; padding: 4px 2px 8px; }
.legend i, .legend .key { display: inline-block; width: 12px; height: 12px; margin-right: 5px; }
.legend i { border-radius: 2px; }
.gantt { display: flex; }
.rows { flex: none; max-width: 34%; font-size: 13px; padding-right: 10px; }
.rows div { height: 34px; line-height: 34px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.scroll { overflow-x: auto; flex: 1; }
.wide { display: block; width: 100%; }
.mark { overflow: visible; stroke-width: 2; }
pre { overflow-x: auto; font-size: 13px; }
.sample { border: 0; border-top: 1px solid #eceef1; margin: 0; padding: 6px 0; }
.sample pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; }
.sample .generated { background: #eef6ee; }
"""


def page(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def tile(name: str, value: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def section(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"
