"""Who did what when: state changes of workers and of the training world, turned into bars."""

from collections.abc import Iterable
from typing import NamedTuple

from pearl.report.reading import Line, RunData

STATES = {
    "starting": "starting",
    "ready": "waiting for weights",
    "updating": "updating",
    "serving": "active",
    "active": "active",
    "stopping": "stopping",
    "gone": "lost",
    "lost": "lost",
    "stopped": "stopped",
}
"""A worker's event and how the report calls the state it began."""
GONE = ("lost", "stopped", "inactive")
"""States without a process: a gap in the row."""
TRAINING_ROW = "training"


class Bar(NamedTuple):
    """One row's state from ``start_s`` to ``end_s``."""

    row: str
    state: str  # "active (colocated)", "updating", "lost", ... for workers; the activity for training
    start_s: float
    end_s: float
    version: str
    detail: str


class Mark(NamedTuple):
    row: str
    time_s: float
    label: str


def bars(run: RunData) -> list[Bar]:
    """In time order within a row."""
    found = [bar for row, lines in rows(run).items() for bar in _bars_of(row, lines, run.end_s)]
    return [bar for bar in found if bar.end_s > bar.start_s]


def rows(run: RunData) -> dict[str, list[Line]]:
    """Lines of each row, the slots in order and the training world last."""
    slots = sorted({line["slot"] for line in run.workers if isinstance(line.get("slot"), int)})
    found = {f"worker {slot}": [line for line in run.workers if line.get("slot") == slot] for slot in slots}
    if run.training:
        found[TRAINING_ROW] = run.training
    return found


def losses(run: RunData) -> list[Mark]:
    """When a worker or the training world was lost, and what was said about it."""
    return [
        Mark(row, line["time_s"], str(line.get("reason") or line.get("event") or "lost"))
        for row, lines in rows(run).items()
        for line in lines
        if state_of(line) == "lost"
    ]


def version_changes(run: RunData) -> list[Mark]:
    """When a slot first served a version."""
    marks = []
    for row, lines in rows(run).items():
        served = ""
        for line in lines:
            version = version_of(line)
            if state_of(line) == "active" and version and version != served:
                marks.append(Mark(row, line["time_s"], version))
                served = version
    return marks


def state_of(line: Line) -> str:
    """A worker's event says more than its activity; the training world's lines have an activity only."""
    event = str(line.get("event") or "")
    return STATES.get(event, str(line.get("activity") or "unknown"))


def version_of(line: Line) -> str:
    """The step of the weights; with the lineage before it once there was a restore."""
    version, lineage = line.get("version"), line.get("lineage")
    if isinstance(version, list):
        lineage, version = version
    if version is None:
        return ""
    return f"{lineage}:{version}" if lineage else str(version)


def _bars_of(row: str, lines: list[Line], end_s: float) -> Iterable[Bar]:
    ends = [line["time_s"] for line in lines[1:]] + [end_s]
    for line, end in zip(lines, ends, strict=True):
        state = state_of(line)
        if state not in GONE:
            yield Bar(row, _with_role(state, line), line["time_s"], end, version_of(line), _detail(line))


def _with_role(state: str, line: Line) -> str:
    role = line.get("role")
    return f"{state} ({role})" if state == "active" and role else state


def _detail(line: Line) -> str:
    names = ("incarnation", "zone", "reason")
    return ", ".join(f"{name} {line[name]}" for name in names if line.get(name) not in (None, ""))
