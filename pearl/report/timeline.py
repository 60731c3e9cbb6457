"""Who did what when: state changes of workers and of the training world as bars.

A row is a GPU where the run said which GPUs its workers have, else a worker.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pearl.report.layout import by_slot, gpus_of, lay_out
from pearl.report.run_data import Line, RunData

STATES = {
    "ready": "waiting for weights",
    "verified": "waiting for the others",
    "proven": "waiting for the others",  # its name in runs of versions before
    "serving": "active",
    "gone": "lost",
}
"""A worker's event and how the report calls the state it began, where the two differ."""
TRAINING_STATES = {"idle": "training idle", "starting": "training starting"}
GAPS = ("lost", "stopped", "inactive", "asleep")
"""States that take nothing of the GPU: a gap in the row."""


class Bar(NamedTuple):
    """One row's state from ``start_s`` to ``end_s``."""

    row: str
    state: str  # "active (colocated)", "updating", … for workers; the activity for training
    start_s: float
    end_s: float
    version: str
    detail: str


def rows(run: RunData) -> list[str]:
    return lay_out(run).rows


def bars(run: RunData) -> list[Bar]:
    """Return the workers' bars, in time order within a worker."""
    layout = lay_out(run)
    found = [
        Bar(row, _with_role(state, line), line["time_s"], end_s, version_of(line), _detail(line))
        for slot, lines in by_slot(run).items()
        for line, end_s in _spans(lines, run.end_s)
        if (state := state_of(line)) not in GAPS
        for row in layout.of_slot(slot)
    ]
    return [bar for bar in found if bar.end_s > bar.start_s]


def training_bars(run: RunData) -> list[Bar]:
    rows = lay_out(run).training
    return [
        Bar(row, training_state(line), line["time_s"], end_s, version_of(line), _detail(line))
        for line, end_s in _spans(run.training, run.end_s)
        if training_state(line) not in GAPS and end_s > line["time_s"]
        for row in rows
    ]


def presence_bars(run: RunData) -> list[Bar]:
    """Return bars for when preemptible GPUs were present or under reclaim."""
    layout = lay_out(run)
    found = []
    for gpu, lines in _by_gpu(run).items():
        for line, end_s in _spans(lines, run.end_s):
            state = {"arrived": "GPU there", "reclaimed": "GPU reclaimed"}.get(str(line.get("event")))
            if state is not None and end_s > line["time_s"]:
                found.append(Bar(layout.of_gpu(gpu), state, line["time_s"], end_s, "", gpu))
    return found


def state_of(line: Line) -> str:
    """Return the display name of a worker's state: its last event if known, else its activity."""
    event = str(line.get("event") or "")
    return STATES.get(event, event) or str(line.get("activity") or "unknown")


def training_state(line: Line) -> str:
    activity = str(line.get("activity") or "unknown")
    return TRAINING_STATES.get(activity, activity)


def version_of(line: Line) -> str:
    """The step of the weights; with the lineage before it once there was a restore."""
    version, lineage = line.get("version"), line.get("lineage")
    if isinstance(version, list):
        lineage, version = version
    if version is None:
        return ""
    return f"{lineage}:{version}" if lineage else str(version)


def _by_gpu(run: RunData) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in run.gpus:
        for gpu in gpus_of(line):
            found.setdefault(gpu, []).append(line)
    return found


def _spans(lines: Sequence[Line], end_s: float) -> Iterator[tuple[Line, float]]:
    """Each line with the time of the next one."""
    ends = [line["time_s"] for line in lines[1:]] + [end_s]
    return zip(lines, ends, strict=False)  # without lines there is an end only


def _with_role(state: str, line: Line) -> str:
    role = line.get("role")
    return f"{state} ({role})" if state == "active" and role else state


def _detail(line: Line) -> str:
    names = ("slot", "incarnation", "zone", "reason")
    return ", ".join(f"{name} {line[name]}" for name in names if line.get(name) not in (None, ""))
