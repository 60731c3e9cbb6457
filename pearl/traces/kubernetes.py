"""Kubernetes' events of nodes, ``kubectl get events -A -o json``: a node is there while it is ready and schedulable.

Read are a list of events, or events one after the other (``--watch``). Events of other objects and of other reasons
are left out. A node that is heard of first when it goes was there from the beginning. Events may come in any order.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from pearl.traces.levels import events_of
from pearl.traces.source import Trace, TraceError, TraceLine, shown

EXAMPLE = "kubectl get events -A -o json"
COMES = ("NodeReady", "NodeSchedulable", "RegisteredNode")
GOES = (
    "DeletingNode",
    "NodeNotReady",
    "NodeNotSchedulable",
    "NodeShutdown",
    "PreemptScheduled",
    "RemovingNode",
)
MAX_NODES = 65_536
_ITEMS = re.compile(r'"items"\s*:\s*\[')
_BLANK = re.compile(r"[\s,]*")


class NodeEvent(NamedTuple):
    moment: datetime
    node: str
    comes: bool


def is_events(text: str) -> bool:
    """Whether it is a list of objects or an event; lines of hand-written traces have neither."""
    return text.startswith("{") and re.search(r'"(?:items|involvedObject|regarding)"\s*:', text) is not None


def read(path: Path, text: str, gpus_per_node: int) -> Trace:
    found: list[NodeEvent] = []
    num_items = 0
    for line, item in _items(path, text):
        num_items += 1
        if (event := _node_event(line, item)) is not None:
            found.append(event)
    if not found:
        raise TraceError(
            f"{path}: holds no event of a node that comes or goes; write it with {EXAMPLE}, before they expire"
        )
    found.sort(key=lambda event: event.moment)
    first = found[0].moment
    there = {event.node: event.comes for event in reversed(found)}  # the first that is heard of each
    present = {node for node, comes in there.items() if not comes}
    if len(there) > MAX_NODES:
        raise TraceError(f"{path}: names {len(there)} nodes, more than {MAX_NODES}")
    levels = [(0.0, len(present) * gpus_per_node)]
    for event in found:
        (present.add if event.comes else present.discard)(event.node)
        levels.append(((event.moment - first).total_seconds(), len(present) * gpus_per_node))
    notes = [f"{len(there)} node(s), {len(found)} event(s) of them"]
    if left_out := num_items - len(found):
        notes.append(f"{left_out} event(s) left out: of other objects, or of other reasons")
    return Trace(events_of(levels), "Kubernetes events", notes)


def _items(path: Path, text: str) -> Iterator[tuple[TraceLine, Any]]:
    """Each event with the line on which it begins."""
    decoder = json.JSONDecoder()
    found = _ITEMS.search(text)
    at, end = (found.end(), "]") if found else (0, "")
    line, counted = 1, 0
    while True:
        at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, at), at
        where = TraceLine(path, line, text[at : at + 200])
        if at == len(text) and not end:
            return
        if end and text.startswith(end, at):
            return
        try:
            item, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            broken = TraceLine(path, error.lineno, "")
            raise broken.error(f"is no JSON: {error.msg} (column {error.colno})") from None
        except (RecursionError, ValueError) as error:
            raise where.error(f"is no JSON that can be read: {shown(str(error))}") from None
        yield where, item


def _node_event(line: TraceLine, item: Any) -> NodeEvent | None:
    if not isinstance(item, dict):
        raise line.error(f'"{shown(line.text)}" is no event; write the file with {EXAMPLE}')
    if item.get("kind") == "Node":
        raise line.error(f"holds nodes as they are, not events; write the file with {EXAMPLE}")
    thing = item.get("involvedObject") or item.get("regarding") or {}
    if not isinstance(thing, dict) or thing.get("kind") != "Node":
        return None
    reason, name = item.get("reason"), thing.get("name")
    if reason not in COMES and reason not in GOES:
        return None
    if not isinstance(name, str) or not name:
        raise line.error("the event's node has no name")
    return NodeEvent(_moment(line, item), name, reason in COMES)


def _moment(line: TraceLine, item: dict[str, Any]) -> datetime:
    text = next(
        (item[key] for key in ("lastTimestamp", "eventTime", "firstTimestamp") if item.get(key)), None
    )
    try:
        moment = datetime.fromisoformat(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise line.error(f'the event\'s time "{shown(str(text))}" is not like 2024-05-01T10:00:00Z') from None
    if moment.tzinfo is None:
        raise line.error(f'the event\'s time "{shown(str(text))}" has no zone')
    return moment
