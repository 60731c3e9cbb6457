"""The status of a run as tables for a person: who works on which GPU, and who has which GPU.

Lenient with the answer: what an older coordinator leaves out is a dash, what a newer one adds is left to ``--json``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pearl.runtime.run_registry import LiveRun

Status = dict[str, Any]
COLUMNS = ("worker", "GPU", "role", "zone", "activity", "version", "running")
WIDE_COLUMNS = ("host", "pid")
"""Only where there is room: they serve to find the process, not to see how things are."""
WIDE = 100
GPU_COLUMNS = ("GPU", "pool", "zone", "present", "holder", "to be back in")
NUMBERS = ("version", "running", "pid", "to be back in")  # right-aligned
STYLES = {"active": "green", "transitioning": "yellow", "inactive": "red"}
TRAINING = -1  # holder of the GPUs that the training world uses


def view(run: LiveRun, answer: Status, width: int) -> RenderableType:
    parts: list[RenderableType] = [
        Text(run.run_dir, style="bold", overflow="fold"),
        Text(_summary(run, answer)),
    ]
    workers = answer.get("workers") or ()
    parts.append(_worker_table(workers, wide=width >= WIDE) if workers else Text("no rollout workers"))
    if gpus := answer.get("gpus"):
        parts.append(_gpu_table(gpus))
    return Group(*parts)


def _summary(run: LiveRun, answer: Status) -> str:
    parts = [f"step {_cell(answer.get('step'))}", f"weight version {_cell(answer.get('weight_version'))}"]
    if "trainer" in answer:
        parts.append(f"trainer {_cell(answer['trainer'])}")
    if "in_flight" in answer:
        parts.append(f"{_cell(answer['in_flight'])} trajectories in flight")
    return ", ".join(parts) + f"; pid {run.pid}"


def _worker_table(workers: Iterable[Status], *, wide: bool) -> Table:
    table = _table((*COLUMNS, *WIDE_COLUMNS) if wide else COLUMNS)
    for worker in workers:
        cells = [
            f"{_cell(worker.get('slot'))}.{_cell(worker.get('incarnation'))}",
            gpu_names(worker.get("gpus") or ()),
            _cell(worker.get("role")),
            _cell(worker.get("zone")),
            _activity(worker),
            _cell(worker.get("weight_version")),
            _cell(worker.get("running")),
        ]
        if wide:
            cells += [_cell(worker.get(name)) for name in WIDE_COLUMNS]
        table.add_row(*map(Text, cells), style=STYLES.get(str(worker.get("activity")), ""))
    return table


def _activity(worker: Status) -> str:
    """Return the worker's activity, or the finer status where there is one."""
    activity, condition = worker.get("activity"), worker.get("condition")
    return _cell(activity if activity == "active" or not condition else condition)


def _gpu_table(gpus: Iterable[Status]) -> Table:
    table = _table(GPU_COLUMNS)
    for gpu in gpus:
        present, reclaiming = gpu.get("present"), gpu.get("reclaiming")
        if reclaiming is True:
            reclaiming = gpu.get("reclaim_seconds_left", True)
        table.add_row(
            Text(_cell(gpu.get("gpu"))),
            Text(_cell(gpu.get("pool"))),
            Text(_cell(gpu.get("zone"))),
            Text("-" if present is None else "yes" if present else "no"),
            Text(_holder(gpu)),
            Text(_seconds_left(reclaiming)),
            style="yellow" if reclaiming not in (None, False) else "dim" if present is False else "",
        )
    return table


def _holder(gpu: Status) -> str:
    holder = gpu.get("holder")
    if holder in (TRAINING, "training"):
        return "training"
    if isinstance(holder, int) and not isinstance(holder, bool):
        return f"worker {holder}"
    if holder:
        return str(holder).replace("slot ", "worker ")
    return "free" if gpu.get("present") else "-"


def _seconds_left(reclaiming: Any) -> str:
    """Return the seconds left of a reclaim; negative ones are overdue."""
    if reclaiming is None or reclaiming is False:
        return "-"
    if reclaiming is True or not isinstance(reclaiming, int | float):
        return "reclaimed"
    return f"{reclaiming:.1f} s" if reclaiming >= 0 else f"late by {-reclaiming:.1f} s"


def gpu_names(gpus: Sequence[str]) -> str:
    """("a/0", "a/1", "b/0") -> "a/0,1 b/0"."""
    by_host: dict[str, list[str]] = {}
    for gpu in gpus:
        host, _, index = str(gpu).rpartition("/")
        by_host.setdefault(host, []).append(index)
    names = (f"{host}/{','.join(found)}" if host else ",".join(found) for host, found in by_host.items())
    return " ".join(names) or "-"


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        # A long host name is broken over lines; the other words must stay readable.
        folds = name in ("GPU", "host")
        overflow: Literal["fold", "ellipsis"] = "fold" if folds else "ellipsis"
        justify: Literal["left", "right"] = "right" if name in NUMBERS else "left"
        table.add_column(name, no_wrap=not folds, overflow=overflow, justify=justify)
    return table


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else str(value)
