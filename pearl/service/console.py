"""What the person at the terminal sees: one readable line for what matters, aligned columns for the steps."""

import logging
from typing import TextIO, assert_never

from pearl.types.config import ElasticConfig
from pearl.types.error_text import without_surrogates
from pearl.types.reports import (
    AnyReport,
    ComparisonReport,
    DecisionReport,
    EvaluationReport,
    GateReport,
    GpusReport,
    HandoffReport,
    NoteReport,
    PlanReport,
    ProfileReport,
    StepReport,
    TrainingReport,
    WorkerReport,
)

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
            self._stream.write(without_surrogates(line) + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._stream = None

    def report(self, report: AnyReport) -> None:
        line = self._line(report)
        if line:
            self.announce(line)

    def _line(self, report: AnyReport) -> str:
        match report:
            case StepReport():
                lent, self._lent = self._lent, False
                dedicated = sum(slot < self._num_workers for slot in self._serving)
                line = step_line(report, dedicated, self._num_workers, len(self._serving) - dedicated)
                return f"{line}  lent" if lent else line
            case EvaluationReport():
                return evaluation_line(report)
            case WorkerReport():
                self._note_worker(report)
                return worker_line(report)
            case TrainingReport():
                return training_line(report)
            case GpusReport():
                return gpus_line(report)
            case HandoffReport():
                self._lent = self._lent or report.event == "borrow"
                line = handoff_line(report)
                return self._first(f"handoff {report.event}", line) if line else ""
            case GateReport():
                return self._changed(f"gate {report.gate}", report.yes, gate_line(report))
            case DecisionReport():
                return "" if report.switch == "none" else decision_line(report)
            case PlanReport():
                return plan_line(report)
            case ComparisonReport():
                return comparison_line(report)
            case ProfileReport():
                return ""
            case NoteReport():
                return report.text
            case _:
                assert_never(report)

    def _first(self, what: str, line: str) -> str:
        """Lending recurs with every step: a person is told once how it goes. Expansions are news each time."""
        if line.startswith("expansion"):
            return line
        return self._changed(what, True, line)

    def _changed(self, what: str, value: object, line: str) -> str:
        before = self._said.get(what)
        self._said[what] = value
        return line if value != before else ""

    def _note_worker(self, report: WorkerReport) -> None:
        if report.activity == "active":
            self._serving.add(report.slot)
        elif report.event != "updating":  # taking new weights is part of serving, for a reader
            self._serving.discard(report.slot)


def gpus_line(report: GpusReport) -> str:
    match report.event:
        case "reclaimed":
            return f"{report.gpus}: reclaimed ({report.reason}), to be back within {report.grace_s:g} s"
        case "returned":
            late = "" if report.on_time is True else ", too late"
            return f"{report.gpus}: returned after {report.seconds:.2f} s{late}"
        case "lost":
            return f"{report.gpus}: lost ({report.reason})"
        case "arrived":
            return f"{report.gpus}: arrived"


def handoff_line(report: HandoffReport) -> str:
    seconds = f"{report.seconds:.2f} s"
    match report.event:
        case "expansion":
            parts = report.parts
            return (
                f"expansion: {report.workers} worker(s) serve after {seconds} "
                f"(preparation {parts['preparation']:.1f}, finalization {parts['finalization']:.1f})"
            )
        case "borrow" if not report.workers:
            return ""  # the batch was complete before any of them served
        case "borrow":
            return f"training GPUs: lent to {report.workers} worker(s), which serve after {seconds}"
        case "return":
            return f"training GPUs: returned after {seconds}; later hand-overs are in report.html"


def gate_line(report: GateReport) -> str:
    outcome = "pays" if report.yes else "does not pay"
    return f"gate: to {report.gate} {outcome}: {report.reason}"


def decision_line(report: DecisionReport) -> str:
    return f"decision for {report.workers} worker(s): {report.target}: {report.reason}"


def comparison_line(report: ComparisonReport) -> str:
    part = "training" if report.part == "training" else f"worker {report.slot}"
    if report.error:
        return f"{part}: does not agree with transformers"
    if report.skipped:
        return f"{part}: not compared with transformers: {report.skipped}"
    return (
        f"{part}: agrees with transformers on {report.num_tokens} tokens, largest gap "
        f"{report.max_gap:.1g} nats ({report.seconds:.1f} s)"
    )


def plan_line(report: PlanReport) -> str:
    """Only what no other line tells: who changes its role."""
    return f"plan: {report.rebind} (slot:role)" if report.rebind else ""


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


def step_line(report: StepReport, serving: int, num_workers: int, extra: int = 0) -> str:
    reward = report.reward_mean
    parts = [
        f"step {report.step:3}",
        "reward     -" if reward is None else f"reward {reward:5.2f}",
        f"{_scaled(report.throughput_tokens_per_s):>6} tok/s",
        f"staleness {report.max_staleness}",
        f"{report.seconds:5.1f} s",
        f"train {report.train_seconds:4.1f} s",
        f"workers {serving}/{num_workers}" + (f" +{extra}" if extra else ""),
    ]
    if report.masked:
        parts.append(f"masked {report.masked}")
    return "  ".join(parts)


def evaluation_line(report: EvaluationReport) -> str:
    line = f"evaluation after {report.step} steps  greedy reward {report.reward_mean:.2f}  on {report.tasks} tasks"
    return f"{line}  masked {report.masked}" if report.masked else line


def worker_line(report: WorkerReport) -> str:
    """Only what is news: a start, a first readiness, a loss."""
    event, reason = report.event, report.reason
    name = f"worker {report.slot}"
    if event == "starting":
        return f"{name}: starting again" if report.incarnation > 1 else f"{name}: starting"
    if event == "ready" and not reason:
        return f"{name}: up, waits for weights"
    if event in ("ready", "stopping", "gone"):
        return f"{name}: {event}: {reason}" if reason else f"{name}: {event}"
    return ""


def training_line(report: TrainingReport) -> str:
    if report.activity == "starting":
        return "trainer: starting" if report.incarnation <= 1 else "trainer: starting again"
    if report.activity == "lost":
        return f"trainer: lost: {report.reason}"
    return ""


def _scaled(value: float) -> str:
    """12100.0 -> "12.1k"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"
