"""The status of a run as tables for a person: who works on which GPU, and who has which GPU.

Lenient with the answer: what an older coordinator leaves out is a dash, what a newer one adds is left to ``--json``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from pearl.cli.stacked_table import Column, Row, stacked_table
from pearl.runtime.run_registry import LiveRun

Status = dict[str, Any]
COLUMNS = (
    Column("worker"),
    Column("GPU", folds=True),
    Column("role"),
    Column("zone"),
    Column("activity"),
    Column("version", is_number=True),
    Column("running", is_number=True),
)
WIDE_COLUMNS = (Column("host", folds=True), Column("pid", is_number=True))
"""Only where there is room: they serve to find the process, not to see how things are."""
WIDE = 100
GPU_COLUMNS = (
    Column("GPU", folds=True),
    Column("pool"),
    Column("zone"),
    Column("present"),
    Column("holder"),
    Column("to be back in", is_number=True),
)
STYLES = {"active": "green", "transitioning": "yellow", "inactive": "red"}
TRAINING = -1  # holder of the GPUs that the training world uses


def view(run: LiveRun, answer: Status, width: int) -> RenderableType:
    """Render the whole status: summary, workers, GPUs."""
    parts: list[RenderableType] = [
        Text(run.run_dir, style="bold", overflow="fold"),
        Text(_summary(run, answer)),
    ]
    if progress := _progress(answer):
        parts.append(Text(progress))
    workers = answer.get("workers") or ()
    parts.append(_worker_table(workers, width) if workers else Text("no rollout workers"))
    if gpus := answer.get("gpus"):
        parts.append(_gpu_table(gpus, width))
    return Group(*parts)


def _summary(run: LiveRun, answer: Status) -> str:
    parts = [f"step {_step(answer)}", f"weight version {_cell(answer.get('weight_version'))}"]
    if "trainer" in answer:
        parts.append(f"trainer {_cell(answer['trainer'])}")
    if "in_flight" in answer:
        parts.append(f"{_cell(answer['in_flight'])} trajectories in flight")
    return ", ".join(parts) + f"; pid {run.pid}"


def _step(answer: Status) -> str:
    step = _cell(answer.get("step"))
    return f"{step} of {answer['num_steps']}" if answer.get("num_steps") else step


def _progress(answer: Status) -> str:
    """Give the newest step's reward and time, and how far the batch of the current one is."""
    parts = []
    if isinstance(reward := answer.get("reward_mean"), int | float):
        parts.append(f"reward {reward:.3g}")
    if isinstance(seconds := answer.get("step_seconds"), int | float):
        parts.append(f"{seconds:.1f} s a step")
    if answer.get("batch_size") and "finished" in answer:
        parts.append(f"{answer['finished']} of {answer['batch_size']} trajectories finished")
    return ", ".join(parts)


def _worker_table(workers: Iterable[Status], width: int) -> Group:
    is_wide, rows = width >= WIDE, []
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
        if is_wide:
            cells += [_cell(worker.get(column.name)) for column in WIDE_COLUMNS]
        rows.append(Row(cells, STYLES.get(str(worker.get("activity")), "")))
    return stacked_table((*COLUMNS, *WIDE_COLUMNS) if is_wide else COLUMNS, rows, width)


def _activity(worker: Status) -> str:
    """Return the worker's activity, or the finer status where there is one."""
    activity, condition = worker.get("activity"), worker.get("condition")
    return _cell(activity if activity == "active" or not condition else condition)


def _gpu_table(gpus: Iterable[Status], width: int) -> Group:
    rows = []
    for gpu in gpus:
        present, reclaiming = gpu.get("present"), gpu.get("reclaiming")
        if reclaiming is True:
            reclaiming = gpu.get("reclaim_seconds_left", True)
        cells = (
            _cell(gpu.get("gpu")),
            _cell(gpu.get("pool")),
            _cell(gpu.get("zone")),
            "-" if present is None else "yes" if present else "no",
            _holder(gpu),
            _seconds_left(reclaiming),
        )
        style = "yellow" if reclaiming not in (None, False) else "dim" if present is False else ""
        rows.append(Row(cells, style))
    return stacked_table(GPU_COLUMNS, rows, width)


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


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else str(value)
