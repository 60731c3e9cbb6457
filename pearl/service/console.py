"""What the person at the terminal sees: one readable line for what matters, aligned columns for the steps."""

import logging
from collections.abc import Mapping
from typing import TextIO

from pearl.types.commands import Report
from pearl.types.config import ElasticConfig

Value = int | float | str | bool | None
Values = Mapping[str, Value]

log = logging.getLogger(__name__)


class Console:
    """Writes to ``stream``; when nobody reads it any more (a closed pipe) the run goes on in silence."""

    def __init__(self, stream: TextIO, num_workers: int) -> None:
        self._stream: TextIO | None = stream
        self._num_workers = num_workers
        self._serving: set[int] = set()
        self._lent = False  # training GPUs, since the last step's line
        self._said: dict[str, object] = {}  # what is said again only when it has changed

    def announce(self, line: str) -> None:
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
            self.announce(line)

    def _line(self, kind: str, values: Values) -> str:
        match kind:
            case "step":
                lent, self._lent = self._lent, False
                dedicated = sum(slot < self._num_workers for slot in self._serving)
                line = step_line(values, dedicated, self._num_workers, len(self._serving) - dedicated)
                return f"{line}  lent" if lent else line
            case "evaluation":
                return evaluation_line(values)
            case "worker":
                self._note_worker(values)
                return worker_line(values)
            case "training":
                return training_line(values)
            case "gpus":
                return gpus_line(values)
            case "handoff":
                self._lent = self._lent or values.get("event") == "borrow"
                line = handoff_line(values)
                return self._first(f"handoff {values.get('event')}", line) if line else ""
            case "gate":
                return self._changed(f"gate {values.get('gate')}", values.get("yes"), gate_line(values))
            case "decision":
                return "" if values.get("switch") == "none" else decision_line(values)
            case "plan":
                return plan_line(values)
            case "comparison":
                return comparison_line(values)
            case "profile":
                return ""
        return str(values.get("text", "")) or kind

    def _first(self, what: str, line: str) -> str:
        """Lending recurs with every step: a person is told once how it goes. Expansions are news each time."""
        if line.startswith("expansion"):
            return line
        return self._changed(what, True, line)

    def _changed(self, what: str, value: object, line: str) -> str:
        before = self._said.get(what)
        self._said[what] = value
        return line if value != before else ""

    def _note_worker(self, values: Values) -> None:
        slot = int(_number(values, "slot"))
        if values.get("activity") == "active":
            self._serving.add(slot)
        elif values.get("event") != "updating":  # taking new weights is part of serving, for a reader
            self._serving.discard(slot)


def gpus_line(values: Values) -> str:
    gpus, event = values.get("gpus"), values.get("event")
    if event == "reclaimed":
        return (
            f"{gpus}: reclaimed ({values.get('reason')}), to be back within {_number(values, 'grace_s'):g} s"
        )
    if event == "returned":
        late = "" if values.get("on_time") else ", too late"
        return f"{gpus}: returned after {_number(values, 'seconds'):.2f} s{late}"
    if event == "lost":
        return f"{gpus}: lost ({values.get('reason')})"
    return f"{gpus}: {event}"


def handoff_line(values: Values) -> str:
    seconds, workers = f"{_number(values, 'seconds'):.2f} s", f"{_number(values, 'workers'):.0f}"
    match values.get("event"):
        case "expansion":
            return (
                f"expansion: {workers} worker(s) serve after {seconds} "
                f"(preparation {_number(values, 'part_preparation'):.1f}, "
                f"finalization {_number(values, 'part_finalization'):.1f})"
            )
        case "borrow" if not _number(values, "workers"):
            return ""  # the batch was complete before any of them served
        case "borrow":
            return f"training GPUs: lent to {workers} worker(s), which serve after {seconds}"
        case "return":
            return f"training GPUs: returned after {seconds}; later hand-overs are in report.html"
    return ""


def gate_line(values: Values) -> str:
    verdict = "pays" if values.get("yes") else "does not pay"
    return f"gate: to {values.get('gate')} {verdict}: {values.get('reason')}"


def decision_line(values: Values) -> str:
    return f"decision for {values.get('workers')} worker(s): {values.get('target')}: {values.get('reason')}"


def comparison_line(values: Values) -> str:
    part = "training" if values.get("part") == "training" else f"worker {values.get('slot')}"
    if values.get("error"):
        return f"{part}: does not agree with transformers"
    if values.get("skipped"):
        return f"{part}: not compared with transformers: {values.get('skipped')}"
    return (
        f"{part}: agrees with transformers on {_number(values, 'num_tokens'):.0f} tokens, largest gap "
        f"{_number(values, 'max_gap'):.1g} nats ({_number(values, 'seconds'):.1f} s)"
    )


def plan_line(values: Values) -> str:
    """Only what no other line tells: who changes its role."""
    rebind = values.get("rebind")
    return f"plan: {rebind} (slot:role)" if rebind else ""


def describe_elasticity(elastic: ElasticConfig) -> str:
    """Said once at the start; "" when nothing is elastic."""
    parts = []
    if elastic.inter:
        parts.append(
            "GPUs may arrive and be reclaimed" + (f" (trace {elastic.trace})" if elastic.trace else "")
        )
    if elastic.borrow != "never":
        parts.append(f"idle training GPUs are lent (borrow = {elastic.borrow})")
    if elastic.pd != "colocated":
        parts.append(f"prefill and decode apart (pd = {elastic.pd})")
    return f"elasticity: {', '.join(parts)}" if parts else ""


def step_line(values: Values, serving: int, num_workers: int, extra: int = 0) -> str:
    reward = values.get("reward_mean")
    parts = [
        f"step {_number(values, 'step'):3.0f}",
        f"reward {reward:5.2f}" if isinstance(reward, int | float) else "reward     -",
        f"{_scaled(_number(values, 'throughput_tokens_per_s')):>6} tok/s",
        f"staleness {_number(values, 'max_staleness'):.0f}",
        f"{_number(values, 'seconds'):5.1f} s",
        f"train {_number(values, 'train_seconds'):4.1f} s",
        f"workers {serving}/{num_workers}" + (f" +{extra}" if extra else ""),
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
