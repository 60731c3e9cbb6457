"""What a run left on disk, read so that a run cut short anywhere still gives a report.

A last line without its end, a missing file, a clock that started again: none of them is an error here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]


class RunData(NamedTuple):
    """Lines of metrics.jsonl by type, in file order; ``time_s`` counts from the run's first line and never falls."""

    name: str
    steps: list[Line]  # one a step: the surviving lineage's where a step was trained again
    evaluations: list[Line]
    workers: list[Line]
    training: list[Line]
    gpus: list[Line]  # arrivals, reclaims, returns and losses of preemptible GPUs
    handoffs: list[Line]  # borrows and returns of the training GPUs, expansions: done, with their seconds
    plans: list[Line]
    decisions: list[Line]  # those of the gates too
    profiles: list[Line]  # what the runtime tracker measured
    trajectories: list[Line]
    summary: Line  # empty when the run was cut short
    config: str
    end_s: float
    torn_lines: int
    samples: list[Line]  # trajectories that were kept as text, the newest ones last


def read_run(run_dir: Path) -> RunData:
    metrics, torn_metrics = read_lines(run_dir / "metrics.jsonl")
    trajectories, torn_trajectories = read_lines(run_dir / "trajectories.jsonl")
    metrics = list(straighten(metrics))
    return RunData(
        name=run_dir.resolve().name,
        steps=_last_of_each(_of_type(metrics, "step"), "step"),
        evaluations=_last_of_each(_of_type(metrics, "evaluation"), "round"),
        workers=_of_type(metrics, "worker"),
        training=_of_type(metrics, "training"),
        gpus=_of_type(metrics, "gpus"),
        handoffs=_of_type(metrics, "handoff"),
        plans=_of_type(metrics, "plan"),
        decisions=_of_type(metrics, "decision", "gate"),
        profiles=_of_type(metrics, "profile"),
        trajectories=trajectories,
        summary=read_object(run_dir / "summary.json"),
        config=_read_text(run_dir / "config.toml"),
        end_s=max((line["time_s"] for line in metrics), default=0.0),
        torn_lines=torn_metrics + torn_trajectories,
        samples=list(read_samples(run_dir).values()),
    )


def read_samples(run_dir: Path) -> dict[int, Line]:
    """The trajectories that the run kept as text, by number; of one that is there twice the later one."""
    found: dict[int, Line] = {}
    for name in ("samples.older.jsonl", "samples.jsonl"):
        for line in read_lines(run_dir / name)[0]:
            if isinstance(line.get("trajectory"), int):
                found.pop(line["trajectory"], None)
                found[line["trajectory"]] = line
    return found


def read_lines(path: Path) -> tuple[list[Line], int]:
    """The JSON objects of a file and the number of lines that are none."""
    lines: list[Line] = []
    torn = 0
    for text in _read_text(path).splitlines():
        line = _parse(text)
        if line is None:
            torn += 1
        else:
            lines.append(line)
    return lines, torn


def straighten(lines: list[Line]) -> Iterator[Line]:
    """Times from 0 on that never fall: after a resume a clock may have started again, and files keep their order."""
    offset = latest = None
    for line in lines:
        time_s = line.get("time_s")
        if not isinstance(time_s, int | float):
            time_s = 0.0 if latest is None else latest - (offset or 0.0)
        if offset is None or latest is None:
            offset, latest = -time_s, 0.0
        elif time_s + offset < latest - 1.0:  # lines of one moment may be written slightly out of order
            offset = latest - time_s
        latest = max(latest, time_s + offset)
        yield {**line, "time_s": latest}


def _of_type(lines: list[Line], *kinds: str) -> list[Line]:
    return [line for line in lines if line.get("kind") in kinds]


def _last_of_each(lines: list[Line], key: str) -> list[Line]:
    latest = {line[key]: line for line in lines if isinstance(line.get(key), int)}
    return [latest[number] for number in sorted(latest)]


def read_object(path: Path) -> Line:
    return _parse(_read_text(path)) or {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _parse(text: str) -> Line | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
