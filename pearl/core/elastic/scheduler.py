"""The elastic scheduler: budget -> decide -> plan -> execute, one path for both kinds of elasticity (paper §4.1).

Mandatory work (reclaims, returns to training) starts at once; each executor has at most one optional plan under way,
and the two never touch the same GPU.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from pearl.core.elastic.allocation_history import AllocationHistory, HistoryState
from pearl.core.elastic.candidate_search import NOTHING_LENT, Lending
from pearl.core.elastic.cluster_rebuilder import ClusterRebuilder, ClusterState
from pearl.core.elastic.decision_engine import MODELS
from pearl.core.elastic.gate import ExpansionGate, GateDecision, GateState, LendingGate, best_seconds, ema
from pearl.core.elastic.preemption import choose_gpus
from pearl.core.elastic.reserved_pool import ReservedPool
from pearl.core.elastic.role_manager import RoleManager, RoleState, report_plan
from pearl.core.elastic.runtime_tracker import RuntimeTracker, TrackerState, TrajectorySample, platform_priors
from pearl.core.elastic.toggle_manager import ToggleManager, ToggleState
from pearl.core.elastic.worker_lifecycle import Target, WorkerLifecycle
from pearl.types import events
from pearl.types.commands import AnswerPreempt, ReturnGpus
from pearl.types.config import Config
from pearl.types.core_context import CoreContext
from pearl.types.gpu_table import GpuRow, GpuTable
from pearl.types.ids import GpuId, Slot
from pearl.types.profile import IterationSums
from pearl.types.reports import GateReport, NoteReport, ProfileReport
from pearl.types.worker_table import WorkerRow


class ElasticState(msgspec.Struct):
    gpu_table: GpuTable
    cluster: ClusterState = msgspec.field(default_factory=ClusterState)
    toggle: ToggleState = msgspec.field(default_factory=ToggleState)
    gate: GateState = msgspec.field(default_factory=GateState)
    tracker: TrackerState = msgspec.field(default_factory=TrackerState)
    roles: RoleState = msgspec.field(default_factory=RoleState)
    step_s: float | None = None  # moving average
    record: HistoryState = msgspec.field(default_factory=HistoryState)
    initial_workers_up: bool = False  # the job's own workers have come up once, and serve


class TrainingDemand(msgspec.Struct, frozen=True):
    """What the pipeline wants of the GPUs now."""

    training_waits: bool  # a batch is complete, or there is no training world: it needs its GPUs
    remaining: int  # R of the B trajectories that the next training step waits for
    batch: int  # B
    steps_left: int


class ElasticScheduler:
    def __init__(self, state: ElasticState, context: CoreContext) -> None:
        self._state = state
        self._seen: tuple[object, ...] | None = None
        """What the newest full look was given; not remembered over a restart."""
        self._wakeup: float | None = None
        self._config = config = context.config
        self._table = context.table
        self._gpus_table = context.gpu_table
        self._trainer = context.trainer
        self._counters = context.counters
        self._commands = context.commands
        self._changes = context.changes
        elastic = config.elastic
        self.tracker = RuntimeTracker(
            state.tracker,
            config.data.batch_size,
            elastic.smoothing,
            platform_priors(config),
            MODELS[elastic.makespan],
            _in_flight(config),
        )
        self._record = AllocationHistory(state.record, elastic.smoothing)
        self._lending_gate = LendingGate(state.gate, elastic)
        self._expansion_gate = ExpansionGate(state.gate, elastic)
        self.lifecycle = WorkerLifecycle(context)
        self.roles = RoleManager(state.roles, context, self.lifecycle, self.tracker)
        self.reserved = ReservedPool(context)
        self.rebuilder = ClusterRebuilder(state.cluster, context, self.lifecycle, self._expansion_gate)
        self.toggle = ToggleManager(state.toggle, context, self.lifecycle, self._lending_gate)

    # the run's lives

    def start(self, now: float) -> None:
        if own := self._own_workers():
            plan = self.roles.assign(own, 1, self._lending(), now)
            report_plan(self._commands, plan, "mandatory", "the job begins", now)
        for row in own:
            self.lifecycle.start(row, now)
        self.toggle.start(now)

    def _own_workers(self) -> list[WorkerRow]:
        """Neither lent by training nor preemptible."""
        rows = self._table.rows.values()
        return [row for row in rows if row.zone == "dedicated" and self._zone(row) == "dedicated"]

    def on_resumed(self, now: float) -> None:
        """Every process of the former life is gone; agents of other hosts join again by themselves."""
        self.rebuilder.state.expansion = None
        self._changes.mark()
        own = {row.host for row in self._gpus_table.of_zone("training")}
        for row in self._table.rows.values():
            if row.status != "gone":
                self.lifecycle.end(row, "the run was resumed", now)
            row.failures.clear()
        for gpu in self._gpus_table.rows.values():
            assert gpu.holder is None or gpu.zone == "training", gpu
            if gpu.host not in own or (gpu.reclaim_deadline_s is not None and not gpu.is_back):
                gpu.present = False
            gpu.is_lost = gpu.is_back = False
            gpu.reclaim_began_s = gpu.reclaim_deadline_s = None
            gpu.holder, gpu.failures, gpu.retry_at_s = None, 0, 0.0

    # what happens

    def on_preempt_requested(self, event: events.PreemptRequested, now: float) -> None:
        """Answer it, and do what was asked for when it can be done."""
        try:
            gpus = choose_gpus(event, self._gpus_table, inter=self._config.elastic.inter)
        except ValueError as error:
            self._commands.emit(AnswerPreempt(event.request, (), str(error)))
            return
        self._commands.emit(AnswerPreempt(event.request, gpus))
        if event.action == "arrive":
            self.on_arrived(events.GpusArrived(gpus), now)
        else:
            self.on_reclaimed(events.GpusReclaimed(gpus, event.grace_s, event.reason), now)

    def on_arrived(self, event: events.GpusArrived, now: float) -> None:
        if event.reserved or self._config.elastic.inter:
            self.rebuilder.on_arrived(event.gpus, now, "dedicated" if event.reserved else "preemptible")
            return
        text = f"{len(event.gpus)} GPU(s) arrived and are not used: elastic.inter = false"
        self._commands.report(NoteReport(now, text=text))

    def on_reclaimed(self, event: events.GpusReclaimed, now: float) -> None:
        rows = self._gpus_table.rows
        if gone := tuple(gpu for gpu in event.gpus if gpu not in rows or not rows[gpu].present):
            self._commands.emit(ReturnGpus(gone, 0.0))
        self.rebuilder.on_reclaimed(event.gpus, event.grace_s, event.reason, now)

    def on_host_lost(self, event: events.HostLost, now: float) -> None:
        self.rebuilder.on_host_lost(event.host, event.reason, now)

    def on_lost(self, row: WorkerRow, reason: str, now: float, *, is_final: bool = False) -> str:
        """A worker is gone, its attempts have been taken over. Returns why the run cannot go on ("" = it can).

        ``is_final``: no other worker on its host could start. Preemptible hosts differ: there it is one more failure.
        """
        stop_is_planned, zone = row.stop_is_planned, self._zone(row)
        self.lifecycle.end(row, reason, now)
        if stop_is_planned:
            return ""
        window_s = self._config.runtime.restart_window_s
        row.failures = [time for time in row.failures if time > now - window_s] + [now]
        if zone == "preemptible":
            self.rebuilder.note_failure(row, now)
        elif zone == "dedicated":
            limit = self._config.runtime.max_restarts
            if not self._gpus_table.is_usable(row.gpus):
                return ""  # its reserved host is gone, and awaited
            if is_final:
                return f"rollout worker {row.slot} cannot start: {reason}"
            if len(row.failures) > limit:
                return (
                    f"rollout worker {row.slot} died {len(row.failures)} times in {window_s:.0f} s, last: {reason}. "
                    f"Its logs are in logs/; runtime.max_restarts = {limit} allows more"
                )
            self.lifecycle.start(row, now)
        return ""

    def _zone(self, row: WorkerRow) -> str:
        return self._gpus_table.rows[row.gpus[0]].zone

    def on_iterations(self, row: WorkerRow, sums: IterationSums) -> None:
        self.tracker.on_iterations(row.role, sums)

    def on_step(self, samples: Sequence[TrajectorySample], began_s: float, now: float) -> None:
        """A batch was trained, the one before at ``began_s``."""
        state, toggle = self._state, self._state.toggle
        seconds = now - began_s
        before = self.tracker.profile()
        dedicated, full = self._num_workers()
        workers = full if toggle.has_served else dedicated
        predicted_s = best_seconds(before, workers, self._config.elastic) if before and workers else None
        costs_s = (toggle.activation_s or 0.0) + (toggle.return_s or 0.0) if toggle.has_served else 0.0
        self._lending_gate.on_step(
            max(0.0, seconds - costs_s), predicted_s, borrowed=toggle.has_served, refused=toggle.has_refused
        )
        toggle.has_served = toggle.has_refused = False
        state.step_s = ema(state.step_s, seconds, self._config.elastic.smoothing)
        # The oldest of the batch may have begun before the step did.
        oldest_s = now - max((sample.live_seconds for sample in samples), default=0.0)
        steady = self._record.is_steady_since(min(began_s, oldest_s))
        served = [(s.allocation, s.seconds) for s in self._record.close_step(now)]
        self.tracker.on_step(samples, served=served, steady=steady)
        if profile := self.tracker.profile():
            workload = msgspec.structs.replace(profile.workload, classes=())
            self._commands.report(
                ProfileReport(
                    now,
                    predicted_s=predicted_s,
                    measured_s=seconds,
                    workload=workload,
                    platform=profile.platform,
                )
            )

    def _num_workers(self) -> tuple[int, int]:
        """Workers that serve or are about to, without the training GPUs and with all of them."""
        rows = self._table.rows.values()
        dedicated = sum(r.zone == "dedicated" and r.status in ("serving", "updating") for r in rows)
        return dedicated, dedicated + sum(r.zone == "overlap" for r in rows)

    # going on

    def advance(self, demand: TrainingDemand, published: Target | None, now: float) -> None:
        """Do what can be done now. Nearly all events are about trajectories and change nothing here: a full look is
        taken only when it is given something else than the last one, or when whoever writes the workers, the GPUs,
        lending or the training world has marked a change. A look that moves something marks it too, for the next."""
        seen = (demand.training_waits, demand.remaining > 0, published and published.version)
        if seen == self._seen and not self._changes.is_set:
            return
        self._seen = seen
        self._changes.clear()
        self._reconcile(demand, published, now)
        self._wakeup = self.rebuilder.next_wakeup(now)

    def _reconcile(self, demand: TrainingDemand, published: Target | None, now: float) -> None:
        version = None if published is None else published.version
        self.lifecycle.stop_broken(now)
        self.rebuilder.advance(version, now)
        for row in self.reserved.take_vacant():
            self.lifecycle.start(row, now)
        self.toggle.advance(demand.training_waits, version, now)
        self.lifecycle.bring_up_to_date(published, now)
        self.roles.advance(self._trainer.step, demand.steps_left, self._joining(), self._lending(), now)
        self._admit(now)
        self._note_roles(now)
        self._lend(demand, now)
        self._expand(demand, now)

    def _admit(self, now: float) -> None:
        """Admit workers that come back one by one, and groups whose waiting is over."""
        group = self._joining()
        for row in self._table.rows.values():
            if row.status == "verified" and row.role == row.target_role and row.slot not in group:
                self.lifecycle.admit(row, now)

    def _note_roles(self, now: float) -> None:
        self._record.note(self.roles.active(), self.roles.allocation(), now)

    def _lending(self) -> Lending:
        if self._config.elastic.borrow == "never":
            return NOTHING_LENT
        return Lending(len(self.toggle.overlap()), self._record.lent_share)

    def _joining(self) -> list[Slot]:
        expansion = self.rebuilder.state.expansion
        return self.toggle.waking() + ([] if expansion is None else expansion.slots) + self._opening()

    def _opening(self) -> list[Slot]:
        """The job's own workers until all of them are there: the first would be sent the whole batch, and a sticky
        router would leave it there. One that has died already is not waited for."""
        if self._state.initial_workers_up:
            return []
        own = self._own_workers()
        if all(row.failures or (row.status == "verified" and row.role == row.target_role) for row in own):
            self._state.initial_workers_up = True
            return []
        return [row.slot for row in own]

    def _lend(self, demand: TrainingDemand, now: float) -> None:
        overlap = self.toggle.overlap()
        if (
            not overlap
            or not self.toggle.training_holds_gpus
            or self._trainer.status != "idle"
            or demand.training_waits
        ):
            return
        is_gated = self._config.elastic.borrow == "gated"
        if is_gated and not (demand.remaining and self._pays_to_lend(demand, now)):
            return
        plan = self.roles.assign_lent(overlap, now)
        report_plan(self._commands, plan, "optional", "training idles", now)
        self.toggle.lend(now)

    def _pays_to_lend(self, demand: TrainingDemand, now: float) -> bool:
        """Call again within a step only when workers have come or gone: R only falls."""
        toggle = self._state.toggle
        dedicated, full = self._num_workers()
        key = (self._trainer.step, dedicated)
        if toggle.refused_for == key:
            return False
        decision = self._lending_gate.should_borrow(
            demand.remaining, demand.batch, self.tracker.profile(), dedicated, full
        )
        toggle.refused_for = (-1, -1) if decision.yes else key
        toggle.has_refused = toggle.has_refused or not decision.yes
        self._report_gate("lend", decision, now)
        return decision.yes

    def _pays_to_expand(self, demand: TrainingDemand, num_joiners: int, now: float) -> bool:
        cluster, step_s = self._state.cluster, self._state.step_s
        dedicated, _ = self._num_workers()
        key = (self._trainer.step, dedicated, num_joiners)
        if cluster.refused_for == key:
            return False
        remaining_s = None if step_s is None else step_s * demand.steps_left
        decision = self._expansion_gate.should_expand(
            remaining_s, self.tracker.profile(), dedicated, dedicated + num_joiners
        )
        cluster.refused_for = (-1, -1, -1) if decision.yes else key
        self._report_gate("expand", decision, now)
        return decision.yes

    def _report_gate(self, gate: Literal["lend", "expand"], decision: GateDecision, now: float) -> None:
        self._commands.report(
            GateReport(
                now,
                gate=gate,
                yes=decision.yes,
                gain_s=decision.gain_s,
                cost_s=decision.cost_s,
                reason=decision.reason,
            )
        )

    def _expand(self, demand: TrainingDemand, now: float) -> None:
        if self.rebuilder.state.expansion is not None:
            return
        joiners = self._form_slots(self.rebuilder.free_gpus(now))
        if joiners and self._pays_to_expand(demand, len(joiners), now):
            plan = self.roles.assign(joiners, demand.steps_left, self._lending(), now)
            self.rebuilder.expand(plan, now)

    def _form_slots(self, free: list[GpuRow]) -> list[WorkerRow]:
        """Bind free GPUs of a host together, as many as a worker needs; a GPU left over waits."""
        size = self._config.rollout.gpus_per_worker
        hosts: dict[str, list[GpuId]] = {}
        for row in free:
            hosts.setdefault(row.host, []).append(row.gpu)
        empty = self._empty_slots()
        return [
            self._slot_for(tuple(gpus[first : first + size]), empty)
            for gpus in hosts.values()
            for first in range(0, len(gpus) - size + 1, size)
        ]

    def _empty_slots(self) -> dict[Slot, WorkerRow]:
        """Return the slots of preemptible workers that are gone."""
        rows = (row for row in self._table.rows.values() if row.status == "gone" and row.zone == "dedicated")
        return {row.slot: row for row in rows if self._zone(row) == "preemptible"}

    def _slot_for(self, gpus: tuple[GpuId, ...], empty: dict[Slot, WorkerRow]) -> WorkerRow:
        """Take out of ``empty`` the slot that had these GPUs before, or one whose GPUs are gone; else a new one."""
        same = next((row for row in empty.values() if row.gpus == gpus), None)
        if same is not None:
            return empty.pop(same.slot)
        for row in empty.values():
            if not any(self._gpus_table.rows[gpu].usable for gpu in row.gpus):
                row.gpus = gpus
                row.failures.clear()
                return empty.pop(row.slot)
        return self._table.add(gpus)

    def next_wakeup(self) -> float | None:
        return self._wakeup

    def check(self) -> None:
        """Every running worker holds its GPUs, and nobody else does."""
        held: dict[GpuId, Slot] = {}
        for row in self._table.rows.values():
            if row.status not in ("gone", "asleep"):
                held.update(dict.fromkeys(row.gpus, row.slot))
        for gpu in self._gpus_table.rows.values():
            expected = held.get(gpu.gpu)
            if expected is not None:
                assert gpu.holder == expected, (gpu, expected)
                assert gpu.present, gpu
            else:
                assert gpu.holder is None or gpu.zone == "training", gpu


def _in_flight(config: Config) -> int:
    """Trajectories at all times, where the next batch begins before the last one ends; else 0."""
    if config.rollout.start == "strict" or config.rollout.staleness_bound == 0:
        return 0
    return config.rollout.max_in_flight or config.data.batch_size
