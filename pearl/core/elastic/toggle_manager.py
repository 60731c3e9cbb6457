"""Intra-scale elasticity: idle training GPUs are lent to overlap workers and come back (paper §4.6).

Processes stay, only device state moves: training offloads, overlap workers wake; they release, training restores. A GPU
has one holder at any time. Returning is mandatory: it cancels an activation under way, and a worker that does not let
go within its limit is killed. So is one that is only starting, once: where starting takes longer than the training
world ever idles it would never come back, so the next return waits for it, within the limit of a start.
"""

from typing import Literal

import msgspec

from pearl.core.elastic.gate import LendingGate
from pearl.core.elastic.worker_lifecycle import WorkerLifecycle
from pearl.types import events
from pearl.types.commands import OffloadTraining, RestoreTraining
from pearl.types.core_context import CoreContext
from pearl.types.gpu_table import TRAINING
from pearl.types.ids import GpuId, OpId, Slot
from pearl.types.reports import HandoffReport, TrainingReport
from pearl.types.weights import Version
from pearl.types.worker_table import INACTIVE, WorkerRow

TogglePhase = Literal["returning", "home", "offloading", "lent", "restoring"]
"""returning: overlap workers let go (at the run's start: they come up first, and sleep, before training takes the
memory); home: the training world has its GPUs, or may start; offloading: its state leaves; lent; restoring: its state
comes back."""
_NEXT: dict[TogglePhase, tuple[TogglePhase, ...]] = {
    # returning -> returning: another life of the run begins, as after every other phase
    "returning": ("returning", "restoring", "home"),
    "home": ("offloading", "returning"),
    # offloading -> home: the training world died, and what it held is free
    "offloading": ("lent", "home", "returning"),
    "lent": ("returning",),
    "restoring": ("home", "returning"),
}
TRANSITIONS: frozenset[tuple[TogglePhase, TogglePhase]] = frozenset(
    (before, after) for before, others in _NEXT.items() for after in others
)


class ToggleState(msgspec.Struct):
    phase: TogglePhase = "returning"
    op: OpId = OpId(0)
    borrow_began_s: float = 0.0
    return_began_s: float = 0.0
    is_woken: bool = False  # every overlap worker of this window serves or has failed
    has_served: bool = False  # in this step
    has_refused: bool = False  # the gate has, in this step
    refused_for: tuple[int, int] = (
        -1,
        -1,
    )  # step and workers with which the gate refused: asked again when they change
    was_lent: bool = False  # since the training world was last home
    has_looked: bool = False  # at the workers to wake: later losses wait for the next window
    aborted_starts: list[Slot] = []  # workers whose start was ended by a return
    has_waited: bool = False  # this return, for one of them
    activation_s: float | None = None  # newest
    return_s: float | None = None
    activations_s: float = 0.0  # sums, for the means
    num_activations: int = 0
    returns_s: float = 0.0

    def enter(self, phase: TogglePhase) -> None:
        """Go on to another phase: one that the table above allows."""
        assert (self.phase, phase) in TRANSITIONS, f"training GPUs: {self.phase} -> {phase} is no move"
        self.phase = phase


class ToggleManager:
    def __init__(
        self, state: ToggleState, context: CoreContext, lifecycle: WorkerLifecycle, gate: LendingGate
    ) -> None:
        self.state = state
        self._trainer = context.trainer
        self._table = context.table
        self._gpus_table = context.gpu_table
        self._lifecycle = lifecycle
        self._gate = gate
        self._config = context.config
        self._counters = context.counters
        self._commands = context.commands
        self._changes = context.changes

    @property
    def training_holds_gpus(self) -> bool:
        return self.state.phase == "home"

    def _enter(self, phase: TogglePhase) -> None:
        self.state.enter(phase)
        self._changes.mark()

    def overlap(self) -> list[WorkerRow]:
        return [row for row in self._table.rows.values() if row.zone == "overlap"]

    def start(self, now: float) -> None:
        """Start overlap engines at the beginning of a process life, before training takes the memory."""
        self._enter("returning")
        self.state.op = OpId(0)
        self.state.was_lent = False
        for row in self.overlap():
            self._lifecycle.start(row, now)

    def waking(self) -> list[Slot]:
        """Return the slots of this window's overlap workers that do not serve yet; they are admitted together,
        none before all are ready."""
        if self.state.phase != "lent" or self.state.is_woken:
            return []
        return [row.slot for row in self.overlap() if row.status in ("activating", "verified", "switching")]

    # lending

    def lend(self, now: float) -> None:
        """Start offloading training in order to lend its GPUs; only while it holds them and is idle."""
        state = self.state
        assert state.phase == "home", state
        assert self._trainer.status == "idle", self._trainer
        self._enter("offloading")
        state.borrow_began_s = now
        state.is_woken = state.has_looked = False
        state.op = self._commands.new_op()
        self._commands.emit(OffloadTraining(state.op, self._trainer.incarnation))
        self._report(now, "offloading")

    def on_offloaded(self, event: events.TrainingOffloaded, now: float) -> bool:
        state = self.state
        if state.phase != "offloading" or event.op != state.op:
            return False
        self._gpus_table.free(self._training_gpus(), TRAINING)
        state.op = OpId(0)
        self._enter("lent")
        state.was_lent = True
        self._counters.borrows += 1
        self._report(now, "lent", event.parts)
        return True

    def on_restored(self, event: events.TrainingRestored, now: float) -> bool:
        state = self.state
        if state.phase != "restoring" or event.op != state.op:
            return False
        state.op = OpId(0)
        self._finish_return(now, event.parts)
        return True

    def on_trainer_lost(self, now: float) -> None:
        """Free what the training world held; what is lent comes back before it starts again."""
        state = self.state
        state.op = OpId(0)
        if held := self._gpus_table.held_by(TRAINING):
            self._gpus_table.free(held, TRAINING)
        if state.phase == "lent":
            self._begin_return(now)
        elif state.phase in ("offloading", "restoring"):
            self._enter("home")
            state.was_lent = False

    def advance(self, is_wanted: bool, version: Version | None, now: float) -> None:
        """Begin or continue a return if ``is_wanted`` or there is no version; else activate the overlap workers."""
        if self.state.phase == "lent" and (is_wanted or version is None):
            self._begin_return(now)
        if self.state.phase == "lent":
            assert version is not None
            self._wake(version, now)
        elif self.state.phase == "returning":
            self._let_go(now)

    def _wake(self, version: Version, now: float) -> None:
        state = self.state
        rows = self.overlap()
        if not state.has_looked:
            state.has_looked = True
            for row in rows:
                if row.status == "asleep":
                    self._clear_aborted_starts(row)
                    self._lifecycle.activate(row, version, now)
                elif row.status == "gone" and len(row.failures) <= self._config.runtime.max_restarts:
                    self._lifecycle.start(row, now)
        if not state.is_woken and not any(_is_waking(row) for row in rows):
            state.is_woken = state.has_served = True
            state.activation_s = now - state.borrow_began_s
            self._gate.on_activated(state.activation_s)
            state.activations_s += state.activation_s
            state.num_activations += 1
            self._counters.activation_seconds_mean = state.activations_s / state.num_activations
            serving = sum(row.status == "verified" for row in rows)
            self._commands.report(
                HandoffReport(
                    now,
                    event="borrow",
                    workers=serving,
                    seconds=state.activation_s,
                    step=self._trainer.step,
                )
            )

    # returning

    def _begin_return(self, now: float) -> None:
        self._enter("returning")
        self.state.return_began_s = now
        self.state.has_waited = False

    def _let_go(self, now: float) -> None:
        rows = self.overlap()
        for row in rows:
            if row.status == "switching" and row.op:
                continue  # its answer is on the way; a worker amid two requests is in doubt
            if row.status in ("ready", "updating", "verified", "serving", "switching", "activating"):
                self._lifecycle.release(row, now)
            elif row.status == "starting" and self.state.was_lent:
                self._abort_start(row, now)
        if any(row.status not in INACTIVE for row in rows):
            return
        if self.state.was_lent and self._trainer.status == "idle":
            self._gpus_table.take(self._training_gpus(), TRAINING)
            self._enter("restoring")
            self.state.op = self._commands.new_op()
            self._commands.emit(RestoreTraining(self.state.op, self._trainer.incarnation))
            self._report(now, "restoring")
        else:
            self._finish_return(now, {})

    def _abort_start(self, row: WorkerRow, now: float) -> None:
        """End its start, or wait for it when that has happened before."""
        if row.slot in self.state.aborted_starts:
            self.state.has_waited = True
        else:
            self.state.aborted_starts.append(row.slot)
            self._lifecycle.stop_planned(row, "training needs its GPUs", 0.0, now)

    def _clear_aborted_starts(self, row: WorkerRow) -> None:
        """Forget the aborted starts of a worker that came up."""
        if row.slot in self.state.aborted_starts:
            self.state.aborted_starts.remove(row.slot)

    def _finish_return(self, now: float, parts: dict[str, float]) -> None:
        state = self.state
        self._enter("home")
        if not state.was_lent:
            return
        state.was_lent = False
        self._counters.returns += 1
        state.return_s = seconds = now - state.return_began_s
        if not state.has_waited:  # a start is no cost of lending
            self._gate.on_returned(seconds)
        state.returns_s += seconds
        self._counters.deactivation_seconds_mean = state.returns_s / self._counters.returns
        self._commands.report(
            HandoffReport(now, event="return", seconds=seconds, step=self._trainer.step, parts=parts)
        )
        if self._trainer.status == "idle":
            self._report(now, "idle")

    def acquire_for_training(self) -> None:
        """The training world starts: it holds its GPUs from now on."""
        self._gpus_table.take(self._training_gpus(), TRAINING)

    def _training_gpus(self) -> tuple[GpuId, ...]:
        return tuple(row.gpu for row in self._gpus_table.of_zone("training"))

    def _report(self, now: float, activity: str, parts: dict[str, float] | None = None) -> None:
        self._commands.report(
            TrainingReport(
                now,
                activity=activity,
                incarnation=self._trainer.incarnation,
                step=self._trainer.step,
                lineage=self._trainer.lineage,
                gpus=",".join(self._training_gpus()),
                reason="",
                parts=parts or {},
            )
        )


def _is_waking(row: WorkerRow) -> bool:
    is_turning = row.status == "verified" and row.role != row.target_role
    return row.status in ("activating", "switching") or is_turning
