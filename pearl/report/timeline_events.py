"""What happened in a moment, on the rows of the timeline: versions, losses, GPUs that came and went, hand-offs."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pearl.report.layout import by_slot, gpus_of, lay_out
from pearl.report.run_data import Line, RunData
from pearl.report.timeline import state_of, training_state, version_of

ON_PURPOSE = ("stopping", "leaving", "stopped")
"""What comes before an end that was wanted."""


class TimelineEvent(NamedTuple):
    row: str
    time_s: float
    label: str


def losses(run: RunData) -> list[TimelineEvent]:
    """List when a worker or the training world was lost, with the reason."""
    return [mark for mark, wanted in _ends(run) if not wanted]


def stops(run: RunData) -> list[TimelineEvent]:
    """List when a worker's process ended as planned: reclaimed, shrunk, replaced."""
    return [mark for mark, wanted in _ends(run) if wanted]


def num_lost(run: RunData) -> int:
    """Workers that ended unwanted."""
    return sum(
        state_of(line) == "lost" and not wanted
        for lines in by_slot(run).values()
        for line, wanted in _with_wish(lines)
    )


def version_changes(run: RunData) -> list[TimelineEvent]:
    """List when each slot first served a version."""
    layout = lay_out(run)
    marks = []
    for slot, lines in by_slot(run).items():
        served = ""
        for line in lines:
            version = version_of(line)
            if state_of(line) == "active" and version and version != served:
                marks += _on(layout.of_slot(slot), line, version)
                served = version
    return marks


def publications(run: RunData) -> list[TimelineEvent]:
    """List when training published each version."""
    layout = lay_out(run)
    return [
        mark
        for line in run.steps
        for mark in _on(layout.training, line, f"version {line['step'] + 1} after step {line['step']}")
        if run.training
    ]


def capacity_changes(run: RunData, event: str) -> list[TimelineEvent]:
    """List when GPUs "arrived", were "reclaimed", "returned" or "lost"."""
    layout = lay_out(run)
    return [
        TimelineEvent(layout.of_gpu(gpu), line["time_s"], _capacity_label(line))
        for line in run.gpus
        if line.get("event") == event
        for gpu in gpus_of(line)
    ]


def handoffs(run: RunData, event: str) -> list[TimelineEvent]:
    """List when a "borrow" or a "return" of the training GPUs was complete."""
    layout = lay_out(run)
    return [
        mark
        for line in run.handoffs
        if line.get("event") == event
        for mark in _on(layout.training, line, f"after {_seconds(line)}")
    ]


def _ends(run: RunData) -> Iterator[tuple[TimelineEvent, bool]]:
    """Every end of a worker or of the training world, and whether it was wanted."""
    layout = lay_out(run)
    for slot, lines in by_slot(run).items():
        for line, wanted in _with_wish(lines):
            if state_of(line) == "lost":
                reason = line.get("reason") or line.get("event")
                yield from ((mark, wanted) for mark in _on(layout.of_slot(slot), line, str(reason)))
    for line in run.training:
        if training_state(line) == "lost":
            yield from (
                (mark, False) for mark in _on(layout.training, line, str(line.get("reason") or "lost"))
            )


def _with_wish(lines: Sequence[Line]) -> Iterator[tuple[Line, bool]]:
    for before, line in pairwise([{}, *lines]):
        yield line, state_of(before) in ON_PURPOSE


def _on(rows: Sequence[str], line: Line, label: str) -> list[TimelineEvent]:
    return [TimelineEvent(row, line["time_s"], label) for row in rows]


def _capacity_label(line: Line) -> str:
    if line.get("event") == "reclaimed":
        grace = line.get("grace_s")
        return f"grace {grace:g} s" if isinstance(grace, int | float) else "reclaimed"
    if line.get("event") == "returned":
        late = "" if line.get("on_time", True) else ", too late"
        return f"after {_seconds(line)}{late}"
    return str(line.get("reason") or line.get("event"))


def _seconds(line: Line) -> str:
    seconds = line.get("seconds")
    return f"{seconds:.2f} s" if isinstance(seconds, int | float) else "?"
