"""A file -> its events. The format is recognised from the first line that is no comment."""

import math
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from pearl.traces import bamboo, json_lines, segments
from pearl.traces.source import TraceLine, read_lines, shown
from pearl.types.trace import TraceEvent

FORMATS = f"""\
event files: {bamboo.EXAMPLE}
counts with the line "t_s,gpus" or "t_s,preemptible_gpus,…" first
JSON lines: {json_lines.EXAMPLE}"""


def read_trace(path: Path, *, speed: float = 1.0, gpus_per_node: int = 1) -> list[TraceEvent]:
    """The events in the order of their moments: all by time, or all by step.

    ``speed`` makes times shorter, but neither steps nor graces: to let go of a GPU takes what it takes.

    Raises:
        TraceError: naming file, line, value and the way out.
        ValueError: for a speed or a number of GPUs that is none.
    """
    if not (math.isfinite(speed) and speed > 0):
        raise ValueError(f"speed {speed} of a trace: give a number above 0; 60 plays an hour in a minute")
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node {gpus_per_node}: a node of a trace has at least 1")
    events = _events(read_lines(path), gpus_per_node)
    if speed == 1.0:
        return events
    return [event if event.at_s is None else replace(event, at_s=event.at_s / speed) for event in events]


def _events(lines: Sequence[TraceLine], gpus_per_node: int) -> list[TraceEvent]:
    first = lines[0]
    if json_lines.is_json(first):
        return json_lines.read(lines)
    if bamboo.is_bamboo(first):
        return bamboo.read(lines, gpus_per_node)
    if segments.is_header(first):
        return segments.read(lines)
    raise first.error(f'"{shown(first.text)}" begins no trace that is known:\n{FORMATS}')
