"""Bamboo's event files, ``ms,add|remove,node``: a node is one unit of capacity, its name only tells it from others."""

from collections.abc import Sequence

from pearl.traces.source import Order, TraceLine, shown
from pearl.types.trace import Action, TraceEvent

ACTIONS: dict[str, Action] = {"add": "arrive", "remove": "reclaim"}
EXAMPLE = '"480000,add,node1"'


def is_bamboo(line: TraceLine) -> bool:
    fields = line.text.split(",")
    return len(fields) > 1 and fields[1].strip() in ACTIONS


def read(lines: Sequence[TraceLine], gpus_per_node: int) -> list[TraceEvent]:
    """A change of several nodes at one moment is one event."""
    events: list[TraceEvent] = []
    there: dict[str, int] = {}  # node -> line on which it was added
    order = Order()
    for line in lines:
        time, verb, node = line.fields(3, EXAMPLE)
        time_ms = line.number_from(time, "the time in ms")
        order.check(line, time_ms, "the time in ms")
        _move(line, verb, node, there)
        _append(events, TraceEvent(ACTIONS[verb], at_s=time_ms / 1e3, count=gpus_per_node))
    return events


def _move(line: TraceLine, verb: str, node: str, there: dict[str, int]) -> None:
    if not node:
        raise line.error(f'"{shown(line.text)}" names no node; it must look like {EXAMPLE}')
    if verb == "add":
        if node in there:
            raise line.error(f'node "{shown(node)}" is added, but it is there since line {there[node]}')
        there[node] = line.number
    elif verb == "remove":
        if there.pop(node, None) is None:
            raise line.error(f'node "{shown(node)}" is removed, but it is not there; add it first')
    else:
        raise line.error(f'"{shown(verb)}" is neither add nor remove')


def _append(events: list[TraceEvent], event: TraceEvent) -> None:
    """Join it with the last one when that is the same change at the same moment."""
    last = events[-1] if events else None
    if last is not None and (last.action, last.at_s) == (event.action, event.at_s):
        events[-1] = TraceEvent(event.action, at_s=event.at_s, count=last.count + event.count)
    else:
        events.append(event)
