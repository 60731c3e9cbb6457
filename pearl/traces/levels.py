"""Events from how many GPUs there are at each moment, for formats that record a level and not a change."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from pearl.types.trace import TraceEvent

GAP_FACTOR = 10
"""A pause this many times the median one, and at least ``MIN_GAP_S``, is worth a remark: nothing was recorded."""
MIN_GAP_S = 600.0


def events_of(levels: Iterable[tuple[float, int]]) -> list[TraceEvent]:
    """Return an event for each change; of several levels at one moment the last one counts. In order of moments."""
    latest = dict(levels)
    events: list[TraceEvent] = []
    present = 0
    for at_s, level in latest.items():
        if level > present:
            events.append(TraceEvent("arrive", at_s=at_s, count=level - present))
        elif level < present:
            events.append(TraceEvent("reclaim", at_s=at_s, count=present - level))
        present = level
    return events


def gap_notes(moments: Sequence[float]) -> list[str]:
    """Remark on long pauses between records, over which the last level is held."""
    pauses = [(later - earlier, earlier) for earlier, later in pairwise(moments)]
    if len(pauses) < 3:
        return []
    limit_s = max(GAP_FACTOR * sorted(pause for pause, _ in pauses)[len(pauses) // 2], MIN_GAP_S)
    gaps = [(pause, earlier) for pause, earlier in pauses if pause > limit_s]
    if not gaps:
        return []
    longest_s, at_s = max(gaps)
    return [
        f"{len(gaps)} gap(s) of more than {limit_s:g} s without a record, the longest of {longest_s:g} s from "
        f"{at_s:g} s on; what was there before is held over them"
    ]
