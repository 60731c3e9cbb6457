"""One worker's life, move by move: every change of a row, its lease and the command that goes with it.

A slot is replaced under a new incarnation, brought to the published version, and serves only when it is proven. Who
moves when is for the cluster rebuilder and the toggle manager.
"""

from typing import Protocol

from pearl.types import events
from pearl.types.commands import (
    ActivateWorker,
    Interrupt,
    ReleaseWorker,
    SetRole,
    StartWorker,
    StopWorker,
    UpdateWeights,
)
from pearl.types.core_context import CoreContext
from pearl.types.ids import Incarnation, OpId, Slot
from pearl.types.reports import WorkerReport
from pearl.types.weights import Version
from pearl.types.worker_table import INACTIVE, WorkerRow, WorkerStatus

MAX_ERRORS = 3
"""Failed attempts of a worker in a row before it is replaced: one can be chance, a broken engine fails them all."""
MAX_FAILED_UPDATES = 3


class Target(Protocol):
    """The published version and its proof."""

    @property
    def version(self) -> Version: ...

    @property
    def checksum(self) -> str: ...


class WorkerLifecycle:
    def __init__(self, context: CoreContext) -> None:
        self._table = context.table
        self._gpus_table = context.gpu_table
        self._config = context.config
        self._commands = context.commands
        self._changes = context.changes

    # moves

    def start(self, row: WorkerRow, now: float) -> None:
        """Begin the slot's next life; its GPUs must be free."""
        self._gpus_table.take(row.gpus, row.slot)
        row.incarnation = Incarnation(row.incarnation + 1)
        row.version = None
        row.host, row.pid = "", 0
        row.streamed_tokens = row.errors = row.failed_updates = 0
        row.stop_is_planned = False
        row.role = row.target_role
        row.op = self._commands.new_op()
        self._move(row, "starting", now)
        self._commands.emit(StartWorker(row.op, row.slot, row.incarnation, row.role, row.gpus))

    def update(self, row: WorkerRow, version: Version, now: float) -> None:
        row.op = self._commands.new_op()
        row.target = version
        self._move(row, "updating", now)
        mode = self._config.rollout.update_mode
        self._commands.emit(UpdateWeights(row.op, row.slot, row.incarnation, version, mode))

    def activate(self, row: WorkerRow, version: Version, now: float) -> None:
        """Wake a sleeping worker; its GPUs must be free."""
        self._gpus_table.take(row.gpus, row.slot)
        row.op = self._commands.new_op()
        row.target = version
        self._move(row, "activating", now)
        self._commands.emit(ActivateWorker(row.op, row.slot, row.incarnation, version))

    def admit(self, row: WorkerRow, now: float) -> None:
        self._move(row, "serving", now)

    def stop_routing(self, row: WorkerRow, now: float) -> None:
        """No new requests: it finishes what it has before it changes its role."""
        row.op = OpId(0)
        self._move(row, "switching", now)

    def set_role(self, row: WorkerRow, now: float) -> None:
        """Change the role of a worker that is not routable and idle."""
        row.op = self._commands.new_op()
        row.role = row.target_role
        if row.status != "switching":
            self._move(row, "switching", now)
        self._commands.emit(SetRole(row.op, row.slot, row.incarnation, row.role))

    def release(self, row: WorkerRow, now: float) -> None:
        """Cut it from routing and have it let go of its memory."""
        row.op = self._commands.new_op()
        self._move(row, "releasing", now)
        limit_s = self._config.elastic.release_limit_s
        self._commands.emit(ReleaseWorker(row.op, row.slot, row.incarnation, limit_s))

    def evict(self, row: WorkerRow, reason: str, now: float) -> None:
        """Cut it from routing and interrupt what it does."""
        row.op = OpId(0)
        self._move(row, "leaving", now, reason)
        self._commands.emit(Interrupt(row.slot, row.incarnation))

    def stop(self, row: WorkerRow, reason: str, now: float) -> None:
        """Kill it: it does not work."""
        self._stop(row, reason, 0.0, now)

    def stop_planned(self, row: WorkerRow, reason: str, grace_s: float, now: float) -> None:
        """End it though nothing is wrong with it; its loss will not be held against its slot."""
        row.stop_is_planned = True
        self._stop(row, reason, grace_s, now)

    def _stop(self, row: WorkerRow, reason: str, grace_s: float, now: float) -> None:
        row.op = OpId(0)
        self._move(row, "stopping", now, reason)
        self._commands.emit(StopWorker(row.slot, row.incarnation, grace_s, reason))

    def end(self, row: WorkerRow, reason: str, now: float) -> None:
        """Note that a worker's processes have exited; its attempts have been taken over already."""
        if row.status not in INACTIVE:
            self._gpus_table.free(row.gpus, row.slot)
        row.op = OpId(0)
        row.version = None
        self._move(row, "gone", now, reason)

    def _set_status(self, row: WorkerRow, to: WorkerStatus) -> None:
        self._table.move(row, to)
        self._changes.mark()

    def _move(self, row: WorkerRow, to: WorkerStatus, now: float, reason: str = "") -> None:
        self._set_status(row, to)
        if to not in ("updating", "activating"):
            row.target = None
        self._commands.report(
            WorkerReport(
                now,
                slot=row.slot,
                incarnation=row.incarnation,
                role=row.role,
                zone=row.zone,
                activity=row.activity,
                event=to,
                version=None if row.version is None else row.version.step,
                lineage=None if row.version is None else row.version.lineage,
                gpus=",".join(row.gpus),
                reason=reason,
            )
        )

    # outcomes; each returns whether it was still awaited

    def on_ready(self, event: events.WorkerReady, now: float) -> bool:
        row = self._awaited(event.op, event.slot, event.incarnation)
        if row is None or row.status != "starting":
            return False
        row.op, row.host, row.pid = OpId(0), event.host, event.pid
        self._move(row, "ready", now)
        return True

    def on_verified(self, event: events.WeightsVerified, target: Target | None, now: float) -> bool:
        row = self._awaited(event.op, event.slot, event.incarnation)
        if row is None or row.status not in ("updating", "activating"):
            return False
        row.op = OpId(0)
        if target is not None and event.version == target.version and event.checksum != target.checksum:
            self._refuse(row, f"checksum {event.checksum} is not {target.checksum} of {target.version}", now)
            return True
        row.version, row.failed_updates = event.version, 0
        row.target = None
        self._set_status(row, "verified")  # not reported: nearly always it is admitted at once
        return True

    def on_update_failed(self, event: events.WeightsFailed, target: Target | None, now: float) -> bool:
        row = self._awaited(event.op, event.slot, event.incarnation)
        if row is None or row.status not in ("updating", "activating"):
            return False
        row.op = OpId(0)
        is_newest = target is not None and row.target == target.version
        if row.status == "updating" and event.superseded and is_newest:
            return True  # nobody's fault, and not to be asked for again: it waits for the newer version
        if row.status == "activating" or is_newest:
            self._refuse(row, event.reason, now)
        else:  # overtaken by events, or its source died: not the worker's fault
            row.version = None
            self._move(row, "ready", now, event.reason)
        return True

    def on_role_set(self, event: events.RoleSet, now: float) -> bool:
        row = self._awaited(event.op, event.slot, event.incarnation)
        if row is None or row.status != "switching":
            return False
        row.op = OpId(0)
        self._set_status(row, "verified")
        return True

    def on_released(self, event: events.WorkerReleased, now: float) -> bool:
        row = self._awaited(event.op, event.slot, event.incarnation)
        if row is None or row.status != "releasing":
            return False
        if row.running:
            self.stop(row, f"said it was released with {row.running} attempts running", now)
            return True
        row.op = OpId(0)
        row.version = None
        self._gpus_table.free(row.gpus, row.slot)
        self._move(row, "asleep", now)
        return True

    def _refuse(self, row: WorkerRow, reason: str, now: float) -> None:
        """An engine of unknown content is tried again; one that was only just woken is not worth it."""
        row.version = None
        row.failed_updates += 1
        if row.status == "activating" or row.failed_updates >= MAX_FAILED_UPDATES:
            self.stop(row, f"{row.failed_updates} weight updates failed: {reason}", now)
        else:
            self._move(row, "ready", now, reason)

    def _awaited(self, op: OpId, slot: Slot, incarnation: Incarnation) -> WorkerRow | None:
        row = self._table.current(slot, incarnation)
        return row if row is not None and row.op == op else None

    # all workers

    def bring_up_to_date(self, target: Target | None, now: float) -> None:
        """Update every worker that is up and does not hold the published version."""
        if target is None:
            return
        for row in self._table.rows.values():
            if row.status == "updating" and not row.op and row.target != target.version:
                self._set_status(row, "ready")  # what it waited for is out
                row.target, row.version = None, None
            if row.status in ("ready", "verified", "serving") and row.version != target.version:
                self.update(row, target.version, now)

    def stop_broken(self, now: float) -> None:
        """A worker that fails every attempt is replaced, before it attracts all traffic by being idle."""
        for row in self._table.rows.values():
            if row.errors >= MAX_ERRORS and row.status == "serving":
                self.stop(row, f"{row.errors} attempts in a row failed", now)
