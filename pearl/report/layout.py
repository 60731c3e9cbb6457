"""The rows of the timeline: a GPU each, labelled with who worked on it, and a row for whoever has no known GPU."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from pearl.report.run_data import Line, RunData

TRAINING = "training"


class Layout(NamedTuple):
    rows: list[str]  # from top to bottom
    training: list[str]  # of the training world
    slots: dict[int, list[str]]
    gpus: dict[str, str]

    def of_slot(self, slot: int) -> list[str]:
        return self.slots[slot]

    def of_gpu(self, gpu: str) -> str:
        return self.gpus[gpu]


def lay_out(run: RunData) -> Layout:
    """GPUs by host and number, then what has none: workers in order, the training world last."""
    of_slot = {slot: _unique(lines) for slot, lines in by_slot(run).items()}
    training = _unique(run.training) or _unique(line for line in run.workers if line.get("zone") == "overlap")
    gpus = {gpu: [TRAINING] if run.training else [] for gpu in training}
    for slot, found in of_slot.items():
        for gpu in found:
            gpus.setdefault(gpu, []).append(f"worker {slot}")
    for gpu in _unique(run.gpus):
        gpus.setdefault(gpu, [])
    labels = {gpu: _label(gpu, gpus[gpu]) for gpu in sorted(gpus, key=_natural)}
    rows_of_slots = {
        slot: [labels[gpu] for gpu in found] or [f"worker {slot}"] for slot, found in of_slot.items()
    }
    training_rows = [labels[gpu] for gpu in training] or ([TRAINING] if run.training else [])
    rows = dict.fromkeys(labels.values())
    rows.update(dict.fromkeys(row for found in rows_of_slots.values() for row in found))
    rows.update(dict.fromkeys(training_rows))
    return Layout(list(rows), training_rows, rows_of_slots, labels)


def by_slot(run: RunData) -> dict[int, list[Line]]:
    """Lines of each worker, the slots in order."""
    found: dict[int, list[Line]] = {}
    for line in run.workers:
        if isinstance(line.get("slot"), int):
            found.setdefault(line["slot"], []).append(line)
    return dict(sorted(found.items()))


def gpus_of(line: Line) -> list[str]:
    """A line names its GPUs in one string."""
    names = line.get("gpus")
    return [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else []


def _unique(lines: Iterable[Line]) -> list[str]:
    return sorted({gpu for line in lines for gpu in gpus_of(line)}, key=_natural)


def _label(gpu: str, users: list[str]) -> str:
    return f"{gpu} · {', '.join(users)}" if users else gpu


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts local/10 after local/9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
