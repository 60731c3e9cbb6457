"""What elasticity did and what it cost, as small tables; nothing for a run whose GPUs were always its own."""

from collections.abc import Sequence
from statistics import mean

from pearl.report.layout import gpus_of
from pearl.report.page import table
from pearl.report.run_data import Line, RunData

MAX_DECISIONS = 200
"""The last ones; metrics.jsonl has them all."""
HIDDEN = ("kind", "time_s")
EVENTS = (
    ("borrow", "training GPUs lent to rollout (activation)"),
    ("return", "training GPUs returned (deactivation)"),
    ("expansion", "expansion"),
)


def tables(run: RunData) -> str:
    """HTML, or "" when there was nothing elastic."""
    counted = table(("what", "how often", "mean seconds", "of which"), costs(run))
    return counted + table(("at", "decision"), decisions(run))


def costs(run: RunData) -> list[tuple[str, str, str, str]]:
    """(what, how often, mean seconds, mean seconds of its parts) of all that happened at least once."""
    rows = []
    for event, name in (("arrived", "GPUs arrived"), ("reclaimed", "GPUs reclaimed")):
        if count := sum(len(gpus_of(line)) for line in run.gpus if line.get("event") == event):
            rows.append((name, str(count), "", ""))
    returned = [line for line in run.gpus if line.get("event") == "returned"]
    if returned:
        late = sum(line.get("on_time") is False for line in returned)
        number = str(sum(len(gpus_of(line)) for line in returned))
        rows.append(
            (
                "GPUs given back",
                number,
                _mean(returned),
                f"{late} time(s) too late" if late else "all in time",
            )
        )
    if lost := sum(len(gpus_of(line)) for line in run.gpus if line.get("event") == "lost"):
        rows.append(("GPUs lost", str(lost), "", ""))
    for event, name in EVENTS:
        if lines := [line for line in run.handoffs if line.get("event") == event]:
            rows.append((name, str(len(lines)), _mean(lines), parts(lines)))
    for activity, name in (
        ("lent", "training state off its GPUs"),
        ("idle", "training state back on its GPUs"),
    ):
        if (lines := [line for line in run.training if line.get("activity") == activity]) and (
            split := parts(lines)
        ):
            rows.append((name, str(len(lines)), "", split))
    for urgency in dict.fromkeys(_urgency(line) for line in run.plans):
        count = sum(_urgency(line) == urgency for line in run.plans)
        rows.append((f"{urgency} plans", str(count), "", ""))
    return rows


def parts(lines: Sequence[Line]) -> str:
    """ "backup 0.12 s, release 0.01 s": means over the lines that have the part."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("part_") and isinstance(value, int | float):
                found.setdefault(key.removeprefix("part_").replace("_", " "), []).append(value)
    return ", ".join(f"{name} {mean(values):.3f} s" for name, values in found.items())


def decisions(run: RunData) -> list[tuple[str, str]]:
    """List the decisions with their times and reasons."""
    return [(f"{line['time_s']:.1f} s", _told(line)) for line in run.decisions[-MAX_DECISIONS:]]


def _told(line: Line) -> str:
    return ", ".join(
        f"{key.replace('_', ' ')} {_shown(value)}"
        for key, value in line.items()
        if key not in HIDDEN and value not in (None, "")
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _urgency(line: Line) -> str:
    return str(line.get("urgency") or "other")


def _mean(lines: Sequence[Line]) -> str:
    values = [line["seconds"] for line in lines if isinstance(line.get("seconds"), int | float)]
    return f"{mean(values):.3f}" if values else "-"
