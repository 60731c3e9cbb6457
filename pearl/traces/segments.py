"""Counts over time, ``t_s,preemptible_gpus,rollout_gpus`` or ``t_s,gpus``: each row says how many GPUs there are from
then on, the first one how many the trace begins with. Other columns are for people."""

from collections.abc import Sequence
from typing import NamedTuple

from pearl.traces.source import Order, TraceLine, shown
from pearl.types.trace import Action, TraceEvent

TIME = "t_s"
COUNTS = ("preemptible_gpus", "gpus")
"""Names of the column that counts, the first one there is; ``rollout_gpus`` counts reserved GPUs too."""


class Columns(NamedTuple):
    """Where the time and the count are, of how many, and what the count is called."""

    time_at: int
    count_at: int
    total: int
    count_name: str


def is_header(line: TraceLine) -> bool:
    return TIME in _names(line)


def read(lines: Sequence[TraceLine]) -> list[TraceEvent]:
    header, *rows = lines
    columns = _columns(header)
    if not rows:
        raise header.error("no row comes after the names of the columns; the trace is empty")
    events: list[TraceEvent] = []
    present = 0
    order = Order()
    for line in rows:
        fields = line.fields(columns.total, f'the first line, "{shown(header.text)}"')
        time_s = line.number_from(fields[columns.time_at], TIME)
        order.check(line, time_s, TIME)
        count = line.count_from(fields[columns.count_at], columns.count_name)
        if count != present:
            action: Action = "arrive" if count > present else "reclaim"
            events.append(TraceEvent(action, at_s=time_s, count=abs(count - present)))
        present = count
    return events


def _names(line: TraceLine) -> list[str]:
    return [name.strip() for name in line.text.split(",")]


def _columns(header: TraceLine) -> Columns:
    names = _names(header)
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise header.error(f'two columns are called "{shown(doubled)}"')
    name = next((name for name in COUNTS if name in names), None)
    if name is None:
        raise header.error(f'"{shown(header.text)}" has no column called {" or ".join(COUNTS)}')
    return Columns(names.index(TIME), names.index(name), len(names), name)
