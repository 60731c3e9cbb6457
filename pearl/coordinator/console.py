"""What the person at the terminal sees: one readable line for what matters, aligned columns for the steps."""

import logging
from collections.abc import Mapping
from typing import TextIO

from pearl.state.commands import Report

Value = int | float | str | bool | None
Values = Mapping[str, Value]

log = logging.getLogger(__name__)


class Console:
    """Writes to ``stream``; when nobody reads it any more (a closed pipe) the run goes on in silence."""

    def __init__(self, stream: TextIO, num_workers: int) -> None:
        self._stream: TextIO | None = stream
        self._num_workers = num_workers
        self._serving: set[int] = set()

    def say(self, line: str) -> None:
        log.info("%s", line)
        if self._stream is None:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._stream = None

    def report(self, report: Report) -> None:
        line = self._line(report.kind, report.values)
        if line:
            self.say(line)

    def _line(self, kind: str, values: Values) -> str:
        match kind:
            case "step":
                return step_line(values, len(self._serving), self._num_workers)
            case "evaluation":
                return evaluation_line(values)
            case "worker":
                self._note_worker(values)
                return worker_line(values)
            case "training":
                return training_line(values)
        return str(values.get("text", "")) or kind

    def _note_worker(self, values: Values) -> None:
        slot = int(_number(values, "slot"))
        if values.get("activity") == "active":
            self._serving.add(slot)
        elif values.get("event") != "updating":  # taking new weights is part of serving, for a reader
            self._serving.discard(slot)


def step_line(values: Values, serving: int, num_workers: int) -> str:
    reward = values.get("reward_mean")
    parts = [
        f"step {_number(values, 'step'):3.0f}",
        f"reward {reward:5.2f}" if isinstance(reward, int | float) else "reward     -",
        f"{_scaled(_number(values, 'throughput_tokens_per_s')):>6} tok/s",
        f"staleness {_number(values, 'max_staleness'):.0f}",
        f"{_number(values, 'seconds'):5.1f} s",
        f"train {_number(values, 'train_seconds'):4.1f} s",
        f"workers {serving}/{num_workers}",
    ]
    if masked := _number(values, "masked"):
        parts.append(f"masked {masked:.0f}")
    return "  ".join(parts)


def evaluation_line(values: Values) -> str:
    line = (
        f"evaluation after {_number(values, 'step'):.0f} steps  greedy reward {_number(values, 'reward_mean'):.2f}"
        f"  on {_number(values, 'tasks'):.0f} tasks"
    )
    masked = _number(values, "masked")
    return f"{line}  masked {masked:.0f}" if masked else line


def worker_line(values: Values) -> str:
    """Only what is news: a start, a first readiness, a loss."""
    event, reason = values.get("event"), values.get("reason")
    name = f"worker {values.get('slot')}"
    again = _number(values, "incarnation") > 1
    if event == "starting":
        return f"{name}: starting again" if again else f"{name}: starting"
    if event == "ready" and not reason:
        return f"{name}: up, waits for weights"
    if event in ("ready", "stopping", "gone"):
        return f"{name}: {event}: {reason}" if reason else f"{name}: {event}"
    return ""


def training_line(values: Values) -> str:
    activity, reason = values.get("activity"), values.get("reason")
    if activity == "starting":
        return "trainer: starting" if _number(values, "incarnation") <= 1 else "trainer: starting again"
    if activity == "lost":
        return f"trainer: lost: {reason}"
    return ""


def _number(values: Values, key: str) -> float:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _scaled(value: float) -> str:
    """12100.0 -> "12.1k"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"
