"""Logs of availability, ``2021-12-11, 11:11:30, 55``: a date, a time and how many instances are free from then on.

Records come when they come; the first one is the trace's beginning. A time of day may have a fraction and a zone, and
date and time may be one field, ``2021-12-11T11:11:30Z, 55``.
"""

import re
from collections.abc import Sequence
from datetime import datetime

from pearl.traces.levels import events_of, gap_notes
from pearl.traces.source import MAX_COUNT, Order, Trace, TraceLine, shown

EXAMPLE = '"2021-12-11, 11:11:30, 55"'
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_HEADER = ("date", "time", "timestamp", "datetime")


def is_availability(line: TraceLine) -> bool:
    return _DATE.match(line.text) is not None


def is_header(line: TraceLine) -> bool:
    """Whether it names the columns of such a log."""
    names = [name.strip().lower() for name in line.text.split(",")]
    return len(names) in (2, 3) and names[0] in _HEADER


def read(lines: Sequence[TraceLine], gpus_per_node: int) -> Trace:
    rows = lines[1:] if is_header(lines[0]) else lines
    if not rows:
        raise lines[0].error("no row comes after the names of the columns; the trace is empty")
    order = Order()
    levels: list[tuple[float, int]] = []
    first: datetime | None = None
    for line in rows:
        moment, text = _fields(line)
        first = first or moment
        if (moment.tzinfo is None) != (first.tzinfo is None):
            raise line.error("some times have a zone and others have none; give all of them one, or none")
        at_s = (moment - first).total_seconds()
        order.check(line, at_s, "seconds since the first line:")
        count = line.count_from(text, "the number of instances")
        if count * gpus_per_node > MAX_COUNT:
            raise line.error(f"{count} instances of {gpus_per_node} GPUs are more than {MAX_COUNT} GPUs")
        levels.append((at_s, count * gpus_per_node))
    return Trace(events_of(levels), "log of availability", gap_notes([at_s for at_s, _ in levels]))


def _fields(line: TraceLine) -> tuple[datetime, str]:
    fields = [field.strip() for field in line.text.split(",")]
    if len(fields) not in (2, 3):
        raise line.error(f'"{shown(line.text)}" has {len(fields)} value(s); it must look like {EXAMPLE}')
    text = "T".join(fields[:-1]).replace(" ", "T", 1)
    try:
        if not _DATE.match(text) or "T" not in text:
            raise ValueError
        return datetime.fromisoformat(text), fields[-1]
    except ValueError:
        moment = shown(", ".join(fields[:-1]))
        raise line.error(f'"{moment}" is no date and time; it must look like {EXAMPLE}') from None
