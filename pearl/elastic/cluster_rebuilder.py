"""Keeps the slots filled and their weights current: start, replace in the slot under a new incarnation, bring every
worker to the published version, and let none serve before it is proven (paper §4.5; the part that needs no plan).
"""

from typing import Protocol

from pearl.state import events
from pearl.state.commands import StartWorker, StopWorker, UpdateWeights
from pearl.state.config import Config
from pearl.state.effects import Effects
from pearl.state.ids import Incarnation, OpId
from pearl.state.weights import Version
from pearl.state.worker_table import Condition, WorkerRow, WorkerTable

MAX_ERRORS = 3
"""Failed attempts of a worker in a row before it is replaced: one can be chance, a broken engine fails them all."""
MAX_FAILED_UPDATES = 3


class Target(Protocol):
    """The published version and its proof."""

    @property
    def version(self) -> Version: ...

    @property
    def checksum(self) -> str: ...


class ClusterRebuilder:
    def __init__(self, table: WorkerTable, config: Config, effects: Effects) -> None:
        self._table = table
        self._config = config
        self._effects = effects

    def start_all(self, now: float) -> None:
        for row in self._table.rows.values():
            if row.condition == "gone":
                self._start(row, now)

    def _start(self, row: WorkerRow, now: float) -> None:
        row.incarnation = Incarnation(row.incarnation + 1)
        row.version = row.target = None
        row.host, row.pid = "", 0
        row.streamed_tokens = row.errors = row.failed_updates = 0
        row.op = self._effects.new_op()
        self._move(row, "starting", now)
        self._effects.emit(StartWorker(row.op, row.slot, row.incarnation, row.role, row.gpus))

    def _move(self, row: WorkerRow, to: Condition, now: float, reason: str = "") -> None:
        self._table.move(row, to)
        if to != "updating":
            row.target = None
        self._effects.report(
            "worker",
            now,
            slot=row.slot,
            incarnation=row.incarnation,
            role=row.role,
            zone=row.zone,
            activity=row.activity,
            event=to,
            version=None if row.version is None else row.version.step,
            lineage=None if row.version is None else row.version.lineage,
            reason=reason,
        )

    # outcomes; each returns whether it was still awaited

    def on_ready(self, event: events.WorkerReady, now: float) -> bool:
        row = self._awaited(event.op, event)
        if row is None or row.condition != "starting":
            return False
        row.op, row.host, row.pid = OpId(0), event.host, event.pid
        self._move(row, "ready", now)
        return True

    def on_proven(self, event: events.WeightsProven, target: Target | None, now: float) -> bool:
        row = self._awaited(event.op, event)
        if row is None or row.condition != "updating":
            return False
        row.op = OpId(0)
        if target is not None and event.version == target.version and event.checksum != target.checksum:
            self._refuse(row, f"checksum {event.checksum} is not {target.checksum} of {target.version}", now)
            return True
        row.version, row.failed_updates = event.version, 0
        self._move(row, "serving", now)
        return True

    def on_update_failed(self, event: events.WeightsFailed, target: Target | None, now: float) -> bool:
        row = self._awaited(event.op, event)
        if row is None or row.condition != "updating":
            return False
        row.op = OpId(0)
        if target is not None and row.target == target.version:
            self._refuse(row, event.reason, now)
        else:  # superseded, or its source died: not the worker's fault
            row.version = None
            self._move(row, "ready", now, event.reason)
        return True

    def _refuse(self, row: WorkerRow, reason: str, now: float) -> None:
        row.version = None
        row.failed_updates += 1
        self._move(row, "ready", now, reason)
        if row.failed_updates >= MAX_FAILED_UPDATES:
            self._stop(row, f"{row.failed_updates} weight updates failed: {reason}", now)

    def _awaited(
        self, op: OpId, event: events.WorkerReady | events.WeightsProven | events.WeightsFailed
    ) -> WorkerRow | None:
        row = self._table.current(event.slot, event.incarnation)
        return row if row is not None and row.op == op else None

    def on_lost(self, row: WorkerRow, reason: str, now: float) -> None:
        """Take it down; its attempts have been taken over already."""
        row.op = OpId(0)
        row.version = None
        self._move(row, "gone", now, reason)
        window = self._config.runtime.restart_window_s
        row.losses = [time for time in row.losses if time > now - window] + [now]

    def replace(self, row: WorkerRow, now: float) -> bool:
        """Start the slot's next life; False when it has died too often."""
        if len(row.losses) > self._config.runtime.max_restarts:
            return False
        self._start(row, now)
        return True

    # weights

    def bring_up_to_date(self, target: Target | None, now: float) -> None:
        """Update every worker that is up and does not serve the published version."""
        if target is None:
            return
        for row in self._table.rows.values():
            if row.condition in ("ready", "serving") and row.version != target.version:
                self._move(row, "updating", now)
                row.target = target.version
                row.op = self._effects.new_op()
                self._effects.emit(
                    UpdateWeights(
                        row.op, row.slot, row.incarnation, target.version, self._config.rollout.update_mode
                    )
                )

    def stop_broken(self, now: float) -> None:
        """A worker that fails every attempt is replaced, before it attracts all traffic by being idle."""
        for row in self._table.rows.values():
            if row.errors >= MAX_ERRORS and row.condition == "serving":
                self._stop(row, f"{row.errors} attempts in a row failed", now)

    def _stop(self, row: WorkerRow, reason: str, now: float) -> None:
        self._move(row, "stopping", now, reason)
        self._effects.emit(StopWorker(row.slot, row.incarnation, 0.0, reason))
