"""What a trace says about how many GPUs there are."""

from collections.abc import Sequence
from itertools import accumulate

from msgspec.structs import replace

from pearl.types.trace import TraceEvent


def counts(events: Sequence[TraceEvent]) -> list[tuple[float, int]]:
    """(moment, GPUs there from then on), one a moment; moments are seconds, or steps where the trace goes by step.

    A trace that reclaims more than arrived was made for a run that had GPUs before: they are counted from the start.
    """
    levels = _levels(events)
    before = -min(levels, default=0)
    found: dict[float, int] = {0.0: before} if before > 0 else {}
    for event, level in zip(events, levels, strict=True):
        found[moment(event)] = level + max(before, 0)
    return list(found.items())


def at_most(events: Sequence[TraceEvent], num_gpus: int) -> list[TraceEvent]:
    """The trace as a pool of ``num_gpus`` sees it: what goes beyond neither arrives nor is reclaimed.

    Events that name their GPUs stay as they are.
    """
    kept = []
    level = 0  # of the counted ones
    for event in events:
        if event.gpus:
            kept.append(event)
            continue
        before, level = level, level + (event.count if event.action == "arrive" else -event.count)
        count = abs(min(level, num_gpus) - min(before, num_gpus))
        if count:
            kept.append(replace(event, count=count))
    return kept


def moment(event: TraceEvent) -> float:
    """Seconds from the trace's beginning, or the step."""
    if event.at_s is not None:
        return event.at_s
    assert event.at_step is not None, event
    return float(event.at_step)


def _levels(events: Sequence[TraceEvent]) -> list[int]:
    signed = (event.num_gpus if event.action == "arrive" else -event.num_gpus for event in events)
    return list(accumulate(signed))
