"""A file -> its events. The format is recognised from the first line that is no comment."""

import math
from pathlib import Path

from msgspec.structs import replace

from pearl.traces import availability, bamboo, json_lines, kubernetes, segments, slurm
from pearl.traces.source import Trace, lines_of, read_text, shown
from pearl.types.trace import TraceEvent

FORMATS = f"""\
event files: {bamboo.EXAMPLE}
counts with the line "t_s,gpus" or "t_s,preemptible_gpus,…" first
JSON lines: {json_lines.EXAMPLE}
logs of availability: {availability.EXAMPLE}
Slurm's accounting: {slurm.EXAMPLE}
Kubernetes' events: {kubernetes.EXAMPLE}"""
MAX_GPUS_PER_NODE = 1024


def read_trace(path: Path, *, speed: float = 1.0, gpus_per_node: int = 1) -> list[TraceEvent]:
    """The events in the order of their moments: all by time, or all by step. See ``load_trace``."""
    return load_trace(path, speed=speed, gpus_per_node=gpus_per_node).events


def load_trace(path: Path, *, speed: float = 1.0, gpus_per_node: int = 1) -> Trace:
    """The events with the format's name and remarks on how they were read.

    ``speed`` makes times shorter, but neither steps nor graces: to let go of a GPU takes what it takes.

    Raises:
        TraceError: naming file, line, value and the way out.
        ValueError: for a speed or a number of GPUs that is none.
    """
    if not (math.isfinite(speed) and speed > 0):
        raise ValueError(f"speed {speed} of a trace: give a number above 0; 60 plays an hour in a minute")
    if not 1 <= gpus_per_node <= MAX_GPUS_PER_NODE:
        raise ValueError(f"gpus_per_node {gpus_per_node}: a node of a trace has 1 to {MAX_GPUS_PER_NODE}")
    trace = _read(path, gpus_per_node)
    if speed == 1.0:
        return trace
    events = [
        event if event.at_s is None else replace(event, at_s=event.at_s / speed) for event in trace.events
    ]
    return trace._replace(events=events)


def _read(path: Path, gpus_per_node: int) -> Trace:
    text = read_text(path)
    lines = lines_of(path, text)
    first = lines[0]
    if kubernetes.is_events(text.lstrip()):
        return kubernetes.read(path, text, gpus_per_node)
    if json_lines.is_json(first):
        return Trace(json_lines.read(lines), "JSON lines", [])
    if bamboo.is_bamboo(first):
        return Trace(bamboo.read(lines, gpus_per_node), "event file", [])
    if segments.is_header(first):
        return Trace(segments.read(lines), "counts over time", [])
    if slurm.is_header(first):
        return slurm.read(lines, gpus_per_node)
    if any(map(availability.is_availability, lines[:2])) and (
        availability.is_availability(first) or availability.is_header(first)
    ):
        return availability.read(lines, gpus_per_node)
    raise first.error(f'"{shown(first.text)}" begins no trace that is known:\n{FORMATS}')
