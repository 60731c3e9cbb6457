"""Hand-written traces, an object a line: ``{"time_s": 10, "arrive": 2}``, ``{"step": 3, "reclaim": ["local/3"],
"grace_s": 5}``. A trace goes by time or by step, not by both: which comes first would be a guess."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from pearl.traces.source import MAX_COUNT, Order, TraceLine, shown
from pearl.types.trace import Action, TraceEvent

EXAMPLE = '{"time_s": 10, "arrive": 2}'
Gpus = int | list[str]


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One line as it is written."""

    time_s: float | None = None
    step: int | None = None
    arrive: Gpus | None = None
    reclaim: Gpus | None = None
    grace_s: float | None = None


def is_json(line: TraceLine) -> bool:
    return line.text.startswith("{")


def read(lines: Sequence[TraceLine]) -> list[TraceEvent]:
    events: list[TraceEvent] = []
    there: dict[str, bool] = {}  # of the GPUs named so far
    order = Order()
    by: str | None = None
    for line in lines:
        entry = _entry(line)
        unit, moment = _moment(line, entry)
        by = by or unit
        if unit != by:
            raise line.error(f'it goes by "{unit}", the lines before by "{by}"; keep to one of them')
        order.check(line, moment, unit)
        event = _event(line, entry)
        _follow(line, event, there)
        events.append(event)
    return events


def _entry(line: TraceLine) -> Entry:
    try:
        value = json.loads(line.text, object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise line.error(f"is no JSON object: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise line.error(str(error)) from None
    try:
        return msgspec.convert(value, Entry)
    except msgspec.ValidationError as error:
        raise line.error(f'"{shown(line.text)}": {error}; it must look like {EXAMPLE}') from None


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is there twice")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number that a trace can hold")


def _moment(line: TraceLine, entry: Entry) -> tuple[str, float]:
    if (entry.time_s is None) == (entry.step is None):
        raise line.error(f'give one of "time_s" and "step", as in {EXAMPLE}')
    if entry.step is not None:
        return "step", line.number_from(str(entry.step), "step")
    return "time_s", line.number_from(str(entry.time_s), "time_s")


def _event(line: TraceLine, entry: Entry) -> TraceEvent:
    if (entry.arrive is None) == (entry.reclaim is None):
        raise line.error(f'give one of "arrive" and "reclaim", as in {EXAMPLE}')
    action: Action = "reclaim" if entry.arrive is None else "arrive"
    given = entry.reclaim if entry.arrive is None else entry.arrive
    gpus, count = _gpus(line, action, given)
    event = TraceEvent(action, entry.time_s, entry.step, gpus, count)
    if entry.grace_s is None:
        return event
    if action == "arrive":
        raise line.error('"grace_s" belongs to a reclaim; an arrival has none')
    grace_s = line.number_from(str(entry.grace_s), "grace_s")
    return msgspec.structs.replace(event, grace_s=grace_s)


def _gpus(line: TraceLine, action: str, given: Gpus | None) -> tuple[tuple[str, ...], int]:
    if isinstance(given, int):
        if not 1 <= given <= MAX_COUNT:
            raise line.error(
                f"{action} {given} is no count of GPUs; give a whole number from 1 to {MAX_COUNT}"
            )
        return (), given
    gpus = tuple(given or ())
    if not gpus or not all(gpu.strip() == gpu != "" for gpu in gpus):
        raise line.error(f'"{action}" names no GPU; give ids like "local/3", or a count')
    if len(set(gpus)) < len(gpus):
        raise line.error(f'"{action}" names a GPU twice')
    return gpus, 0


def _follow(line: TraceLine, event: TraceEvent, there: dict[str, bool]) -> None:
    """A GPU that comes while it is there, or goes while it is not, means that lines are missing."""
    arrives = event.action == "arrive"
    for gpu in event.gpus:
        if there.get(gpu) is arrives:
            state = "there already" if arrives else "gone already"
            raise line.error(f'"{shown(gpu)}" is to {event.action}, but after the lines before it is {state}')
        there[gpu] = arrives
