"""Slurm's accounting, ``sacct -P -o JobID,State,Start,End,NodeList,AllocTRES``: the nodes of a job are there from its
start to its end, as for a job of the preemptible partition that was given them and lost them.

Steps (``123.batch``) repeat their job's nodes and are left out, as are jobs that never started. A job without an end
still runs. Rows may come in any order. GPUs are those of AllocTRES, else ``gpus_per_node`` for each node, which counts
once however many jobs share it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from pearl.traces.levels import events_of
from pearl.traces.source import MAX_COUNT, Trace, TraceLine, shown

EXAMPLE = "sacct -P -o JobID,State,Start,End,NodeList,AllocTRES"
NEEDED = ("start", "end", "nodelist")
NEVER = ("", "none", "unknown")
NO_NODES = ("", "none", "none assigned", "(null)")
MAX_NODES = 65_536
"""Of one job."""
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d{1,9})(?:,|$)", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


class Job(NamedTuple):
    start: datetime
    end: datetime | None
    nodes: list[str]
    gpus: int | None  # None: as its nodes have
    state: str


def is_header(line: TraceLine) -> bool:
    names = _names(line)
    return all(name in names for name in NEEDED)


def read(lines: Sequence[TraceLine], gpus_per_node: int) -> Trace:
    header, *rows = lines
    names = _names(header)
    jobs = [job for line in rows if (job := _job(line, names)) is not None]
    if not jobs:
        raise header.error("no job in it has started on a node; the trace is empty")
    first = min(job.start for job in jobs)
    changes: list[tuple[float, int, Job]] = []
    for job in jobs:
        changes.append(((job.start - first).total_seconds(), 1, job))
        if job.end is not None:
            changes.append(((job.end - first).total_seconds(), -1, job))
    changes.sort(key=lambda change: change[:2])  # who goes, then who comes, at one moment
    levels: list[tuple[float, int]] = []
    held: Counter[str] = Counter()
    num_gpus = 0  # of jobs that say how many
    for at_s, sign, job in changes:
        if job.gpus is not None:
            num_gpus += sign * job.gpus
        else:
            for node in job.nodes:
                held[node] += sign
                if not held[node]:
                    del held[node]
        level = num_gpus + len(held) * gpus_per_node
        if level > MAX_COUNT:
            raise header.error(f"{level} GPUs at {at_s:g} s are more than {MAX_COUNT}; choose a partition")
        levels.append((at_s, level))
    return Trace(events_of(levels), "Slurm accounting", _notes(rows, jobs))


def nodes_of(text: str) -> list[str]:
    """Return the names that a node list stands for, ``gpu[01-03,7],login2``.

    Raises:
        ValueError: it is none, or stands for too many.
    """
    return [name for part in _parts(text) for name in _expanded(part)]


def _notes(rows: Sequence[TraceLine], jobs: list[Job]) -> list[str]:
    states = Counter(job.state for job in jobs)
    listed = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    notes = [f"{len(jobs)} job(s): {listed}"]
    if left_out := len(rows) - len(jobs):
        notes.append(f"{left_out} row(s) left out: steps, and jobs that never started on a node")
    if still := sum(job.end is None for job in jobs):
        notes.append(f"{still} job(s) have no end: their nodes stay to the trace's end")
    return notes


def _names(line: TraceLine) -> list[str]:
    return [name.strip().lower() for name in line.text.split("|")]


def _job(line: TraceLine, names: list[str]) -> Job | None:
    fields = [field.strip() for field in line.text.split("|")]
    if len(fields) != len(names):
        raise line.error(
            f'"{shown(line.text)}" has {len(fields)} value(s), the first line {len(names)}; write it with {EXAMPLE}'
        )
    row = dict(zip(names, fields, strict=True))
    if "." in row.get("jobid", "") or row["start"].lower() in NEVER or row["nodelist"].lower() in NO_NODES:
        return None
    start, end = _moment(line, row["start"], "Start"), None
    if row["end"].lower() not in NEVER:
        end = _moment(line, row["end"], "End")
        if end < start:
            raise line.error(f"End {row['end']} comes before Start {row['start']}")
        if end == start:
            return None
    try:
        nodes = nodes_of(row["nodelist"])
    except ValueError as error:
        raise line.error(f'NodeList "{shown(row["nodelist"])}": {error}') from None
    state = (row.get("state") or "UNKNOWN").split()[0]  # "CANCELLED by 1000"
    found = _GPUS.search(row.get("alloctres", ""))
    return Job(start, end, nodes, int(found[1]) if found else None, shown(state))


def _moment(line: TraceLine, text: str, what: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise line.error(f'{what} "{shown(text)}" is not a time like 2024-05-01T10:00:00') from None
    return moment.replace(tzinfo=None)


def _parts(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError("its brackets do not fit")
        if letter == "," and not depth:
            parts.append(text[begin:place])
            begin = place + 1
    if depth:
        raise ValueError("its brackets do not fit")
    return [*parts, text[begin:]]


def _expanded(part: str) -> list[str]:
    names = [""]
    for piece in re.split(r"(\[[^\]]*\])", part.strip()):
        choices = _choices(piece[1:-1]) if piece.startswith("[") else [piece]
        if len(names) * len(choices) > MAX_NODES:
            raise ValueError(f"it stands for more than {MAX_NODES} nodes")
        names = [name + choice for name in names for choice in choices]
    if "" in names:
        raise ValueError("it names no node")
    return names


def _choices(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f'"{shown(part)}" is no range of numbers')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_NODES:
            raise ValueError(f'"{shown(part)}" is no range of up to {MAX_NODES} nodes')
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found
