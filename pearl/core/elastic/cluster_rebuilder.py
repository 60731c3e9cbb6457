"""Inter-scale elasticity: workers on preemptible GPUs join as a group and leave on time (paper §4.5).

Shrinking is urgent: cut from routing, interrupt, keep the partial trajectories, give the GPUs back within the grace.
Expanding is deferrable: joiners start while the rest serves, take the newest weights once they are up, and are
admitted together; if one of them fails, none of them was ever there.
"""

from collections.abc import Iterable

import msgspec

from pearl.core.elastic.gate import ExpansionGate
from pearl.core.elastic.role_manager import report_plan
from pearl.core.elastic.worker_lifecycle import WorkerLifecycle
from pearl.types.commands import ReturnGpus
from pearl.types.core_context import CoreContext
from pearl.types.gpu_table import GpuRow, GpuZone
from pearl.types.ids import GpuId, Slot
from pearl.types.plan import Plan
from pearl.types.reports import GpusReport, HandoffReport, NoteReport
from pearl.types.weights import Version
from pearl.types.worker_table import WorkerRow

RETRY_S = 5.0
"""Before a GPU is tried again on which a worker failed twice in a row; doubles with each failure more."""
KILL_SHARE = 0.2
KILL_SHARE_MAX_S = 2.0
"""The end of a grace that is kept for killing what has not ended by itself, and for the news to travel."""
STOPPABLE = ("starting", "ready", "verified", "asleep", "activating")


class Expansion(msgspec.Struct):
    """A group of joiners on its way; never routable before all of it is."""

    slots: list[Slot]
    began_s: float
    ready_s: float | None = None  # when the last of them was up: from preparation to finalization


class ClusterState(msgspec.Struct):
    expansion: Expansion | None = None
    refused_for: tuple[int, int, int] = (-1, -1, -1)  # step, workers and joiners with which the gate refused


class ClusterRebuilder:
    def __init__(
        self, state: ClusterState, context: CoreContext, lifecycle: WorkerLifecycle, gate: ExpansionGate
    ) -> None:
        self.state = state
        self._table = context.table
        self._gpus_table = context.gpu_table
        self._lifecycle = lifecycle
        self._gate = gate
        self._config = context.config
        self._counters = context.counters
        self._commands = context.commands
        self._changes = context.changes

    # what comes and goes

    def on_arrived(self, gpus: tuple[GpuId, ...], now: float, zone: GpuZone = "preemptible") -> None:
        """Take arrived GPUs; those still being given back arrive once they have been."""
        self._changes.mark()
        known = self._gpus_table.rows
        for row in (known[gpu] for gpu in gpus if gpu in known):
            row.is_back = row.reclaim_deadline_s is not None
        new = [gpu for gpu in gpus if gpu not in known or not known[gpu].present]
        for gpu in new:
            row = known.get(gpu) or self._gpus_table.add(gpu, zone)
            row.present, row.failures, row.retry_at_s = True, 0, 0.0
        self._counters.arrivals += self._num_preemptible(new)
        if new:
            self._commands.report(GpusReport(now, event="arrived", gpus=",".join(new)))

    def on_reclaimed(self, gpus: tuple[GpuId, ...], grace_s: float, reason: str, now: float) -> None:
        """Mandatory: it begins at once and cancels an expansion that it overlaps."""
        rows = [self._gpus_table.rows[gpu] for gpu in gpus if gpu in self._gpus_table.rows]
        new = self._take_back(
            [row for row in rows if row.present and row.zone == "preemptible"], grace_s, now
        )
        if new:
            told = ",".join(row.gpu for row in new)
            self._commands.report(
                GpusReport(now, event="reclaimed", gpus=told, grace_s=grace_s, reason=reason)
            )
        self._shrink(now)

    def on_host_lost(self, host: str, reason: str, now: float) -> None:
        """Mark a host's GPUs as lost; the losses of its workers are events of their own."""
        there = [row for row in self._gpus_table.rows.values() if row.host == host and row.present]
        self._take_back(there, 0.0, now)
        lost = [row for row in there if not row.is_lost]
        for row in lost:
            row.is_lost = True
        if lost:
            told = ",".join(row.gpu for row in lost)
            self._commands.report(GpusReport(now, event="lost", gpus=told, reason=reason))
        self._shrink(now)

    def _take_back(self, rows: list[GpuRow], grace_s: float, now: float) -> list[GpuRow]:
        """Returns those of them that were not being taken back already."""
        self._changes.mark()
        new = [row for row in rows if row.reclaim_deadline_s is None]
        for row in rows:
            sooner = now + grace_s if row.reclaim_deadline_s is None else row.reclaim_deadline_s
            row.reclaim_began_s = now if row.reclaim_began_s is None else row.reclaim_began_s
            row.reclaim_deadline_s = min(sooner, now + grace_s)
            row.is_back = False
        self._counters.reclaims += self._num_preemptible(row.gpu for row in new)
        return new

    def _num_preemptible(self, gpus: Iterable[GpuId]) -> int:
        return sum(self._gpus_table.rows[gpu].zone == "preemptible" for gpu in gpus)

    def _leavers(self) -> list[WorkerRow]:
        held = {row.holder for row in self._gpus_table.rows.values() if row.reclaim_deadline_s is not None}
        return [row for row in self._table.rows.values() if row.slot in held]

    def _deadline(self, row: WorkerRow) -> float:
        """Return when what is left of a leaving worker is killed, early enough for its GPUs to be back in time."""
        found = None
        for gpu in (self._gpus_table.rows[gpu] for gpu in row.gpus):
            if gpu.reclaim_deadline_s is not None and gpu.reclaim_began_s is not None:
                grace_s = gpu.reclaim_deadline_s - gpu.reclaim_began_s
                due = gpu.reclaim_deadline_s - min(KILL_SHARE * grace_s, KILL_SHARE_MAX_S)
                found = due if found is None else min(found, due)
        assert found is not None, row
        return found

    def _shrink(self, now: float) -> None:
        leavers = self._leavers()
        fresh = [row.slot for row in leavers if row.status not in ("leaving", "stopping")]
        if fresh:
            report_plan(self._commands, Plan(remove=tuple(fresh)), "mandatory", "reclaimed", now)
        if self.state.expansion is not None and set(fresh) & set(self.state.expansion.slots):
            self._cancel("one of its GPUs was reclaimed", now)
        for row in leavers:
            self._let_go(row, now)
        self._give_back(now)

    def _let_go(self, row: WorkerRow, now: float) -> None:
        """Release reclaimed GPUs as far as possible now; called again whenever something has happened."""
        left_s = self._deadline(row) - now
        if row.status == "stopping":
            return
        if self._is_sudden(row):
            self._lifecycle.stop(row, "its GPUs are gone", now)
        elif row.status in STOPPABLE or (
            row.status in ("serving", "updating", "switching") and not row.running
        ):
            self._lifecycle.stop_planned(row, "reclaimed", max(0.0, left_s), now)
        elif row.status in ("serving", "updating", "switching") and left_s > 0:
            self._lifecycle.evict(row, "reclaimed", now)
        elif row.status == "leaving" and not row.running:
            self._lifecycle.stop_planned(row, "reclaimed", max(0.0, left_s), now)
        elif left_s <= 0:
            self._lifecycle.stop_planned(row, "reclaimed, and the grace is over", 0.0, now)

    def _give_back(self, now: float) -> None:
        """Hand back the reclaimed GPUs that nobody holds any more."""
        due = [
            r for r in self._gpus_table.rows.values() if r.reclaim_deadline_s is not None and r.holder is None
        ]
        if not due:
            return
        if there := [row for row in due if not row.is_lost]:
            self._tell_returned(there, now)
        self._changes.mark()
        back = tuple(row.gpu for row in due if row.is_back)
        for row in due:
            row.present = row.is_lost = row.is_back = False
            row.reclaim_began_s = row.reclaim_deadline_s = None
        if back:
            self.on_arrived(back, now)

    def _tell_returned(self, rows: list[GpuRow], now: float) -> None:
        seconds = now - min(row.reclaim_began_s for row in rows if row.reclaim_began_s is not None)
        # Without any grace there is no time to be late for.
        due = [row.reclaim_deadline_s for row in rows if row.reclaim_deadline_s != row.reclaim_began_s]
        on_time = all(now <= deadline_s for deadline_s in due if deadline_s is not None)
        gpus = tuple(row.gpu for row in rows)
        self._commands.emit(ReturnGpus(gpus, seconds))
        self._commands.report(
            GpusReport(now, event="returned", gpus=",".join(gpus), seconds=seconds, on_time=on_time)
        )

    def _is_sudden(self, row: WorkerRow) -> bool:
        """Whether its GPUs were taken without any grace."""
        gpus = [self._gpus_table.rows[gpu] for gpu in row.gpus]
        return any(
            g.reclaim_deadline_s is not None and g.reclaim_deadline_s == g.reclaim_began_s for g in gpus
        )

    # joiners

    def advance(self, version: Version | None, now: float) -> None:
        """Go on with the reclaims and the expansion under way."""
        self._shrink(now)
        expansion = self.state.expansion
        if expansion is None:
            return
        rows = [self._table.rows[slot] for slot in expansion.slots]
        if any(row.status in ("stopping", "gone") for row in rows):
            self._cancel("a joiner failed", now)
            return
        if expansion.ready_s is None and all(row.status != "starting" for row in rows):
            expansion.ready_s = now
        if version is not None and all(_is_admissible(row, version) for row in rows):
            self._admit(expansion, rows, now)

    def expand(self, plan: Plan, now: float) -> None:
        """Begin the optional plan: its slots are filled in the background."""
        assert self.state.expansion is None, "at most one optional plan at once"
        slots = [assignment.slot for assignment in plan.add]
        self.state.expansion = Expansion(slots, now)
        report_plan(self._commands, plan, "optional", "arrived", now)
        for slot in slots:
            self._lifecycle.start(self._table.rows[slot], now)

    def _admit(self, expansion: Expansion, rows: list[WorkerRow], now: float) -> None:
        assert expansion.ready_s is not None
        self.state.expansion = None
        self._counters.expansions += 1
        for row in rows:
            for gpu in row.gpus:
                self._gpus_table.rows[gpu].failures = 0
            self._lifecycle.admit(row, now)
        preparation_s, finalization_s = expansion.ready_s - expansion.began_s, now - expansion.ready_s
        self._gate.on_expanded(preparation_s, finalization_s)
        self._commands.report(
            HandoffReport(
                now,
                event="expansion",
                workers=len(rows),
                seconds=now - expansion.began_s,
                parts={"preparation": preparation_s, "finalization": finalization_s},
            )
        )

    def _cancel(self, reason: str, now: float) -> None:
        expansion = self.state.expansion
        assert expansion is not None
        self.state.expansion = None
        self._counters.expansions_cancelled += 1
        text = f"expansion of {len(expansion.slots)} worker(s) cancelled: {reason}"
        self._commands.report(NoteReport(now, text=text))
        for row in (self._table.rows[slot] for slot in expansion.slots):
            if row.status not in ("stopping", "gone", "leaving"):
                self._lifecycle.stop_planned(row, "its expansion was cancelled", 0.0, now)

    def note_failure(self, row: WorkerRow, now: float) -> None:
        """A worker on preemptible GPUs died: they are tried again, later each time, and at last no more."""
        self._changes.mark()
        for gpu in (self._gpus_table.rows[gpu] for gpu in row.gpus):
            gpu.failures += 1
            gpu.retry_at_s = now + (RETRY_S * 2.0 ** (gpu.failures - 2) if gpu.failures > 1 else 0.0)

    def free_gpus(self, now: float) -> list[GpuRow]:
        """Preemptible GPUs on which a worker may be started now."""
        limit = self._config.runtime.max_restarts
        return [
            row
            for row in self._gpus_table.of_zone("preemptible")
            if row.usable and row.holder is None and row.failures <= limit and row.retry_at_s <= now
        ]

    def next_wakeup(self, now: float) -> float | None:
        times = [self._deadline(row) for row in self._leavers() if row.status != "stopping"]
        limit = self._config.runtime.max_restarts
        times += [
            row.retry_at_s
            for row in self._gpus_table.of_zone("preemptible")
            if row.usable and row.holder is None and row.failures <= limit and row.retry_at_s > now
        ]
        return min(times, default=None)


def _is_admissible(row: WorkerRow, version: Version) -> bool:
    return row.status == "verified" and row.version == version and row.role == row.target_role
