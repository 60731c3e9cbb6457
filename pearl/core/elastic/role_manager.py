"""Who prefills, who decodes, who does both: decides again whenever workers or the workload have changed, and has only
the workers switch that the plan names (paper §4.3.2, §4.4.2).

Switching is rolling: a worker is cut from routing, finishes what it has, and serves in its new role; at least one
complete serving path stays while any can. A worker that comes up is in its role before it is admitted.

Training GPUs that are lent come and go with every step: their workers take the best roles beside those of the workers
that stay, which keep theirs and are left as they were when the GPUs go home.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from pearl.core.elastic.candidate_search import NOTHING_LENT, Lending
from pearl.core.elastic.decision_engine import Decision, SwitchCost, decide
from pearl.core.elastic.gate import ema
from pearl.core.elastic.orchestration import make_plan
from pearl.core.elastic.runtime_tracker import RuntimeTracker
from pearl.core.elastic.worker_lifecycle import WorkerLifecycle
from pearl.types import events
from pearl.types.command_buffer import CommandBuffer
from pearl.types.core_context import CoreContext
from pearl.types.ids import Slot
from pearl.types.plan import Allocation, Assignment, Plan, Role
from pearl.types.reports import DecisionReport, PlanReport
from pearl.types.worker_table import WorkerRow

SHOWN_CANDIDATES = 64
ACTIVE = ("serving", "updating", "verified", "switching")


class RoleState(msgspec.Struct):
    decided_for: tuple[int, tuple[Slot, ...]] = (-1, ())  # step and active workers of the newest decision
    switch_s: float | None = None  # moving average of a worker's switch


class RoleManager:
    def __init__(
        self, state: RoleState, context: CoreContext, lifecycle: WorkerLifecycle, tracker: RuntimeTracker
    ) -> None:
        self._state = state
        self._table = context.table
        self._lifecycle = lifecycle
        self._tracker = tracker
        self._config = context.config
        self._counters = context.counters
        self._commands = context.commands

    @property
    def is_settled(self) -> bool:
        """Every worker is colocated for good: there is nothing to decide."""
        return self._config.elastic.pd == "colocated"

    def active(self) -> list[WorkerRow]:
        return [row for row in self._table.rows.values() if row.status in ACTIVE]

    def advance(
        self, step: int, steps_left: int, joining: Iterable[Slot], lending: Lending, now: float
    ) -> None:
        """Decide when something has changed, and go on switching. ``joining`` are not admitted yet."""
        if self.is_settled:
            return
        held = set(joining)
        rows = [row for row in self.active() if row.slot not in held]
        key = (step, tuple(row.slot for row in rows))
        if rows and key != self._state.decided_for:
            self._state.decided_for = key
            self._decide(rows, steps_left, lending, now)
        self._switch(held, now)

    def assign(self, joiners: Sequence[WorkerRow], steps_left: int, lending: Lending, now: float) -> Plan:
        """The plan that takes the joiners in, each with its role; survivors switch once the joiners are there."""
        stay, _ = _by_zone(self.active())
        target = Allocation(colocated=len(stay) + len(joiners))
        if not self.is_settled:
            target = self._ask(target.total, allocation_of(stay), steps_left, now, lending=lending).target
        plan = make_plan(_wanted(stay), (), [row.slot for row in joiners], target)
        self._adopt(plan.add)
        return plan

    def assign_lent(self, lent: Sequence[WorkerRow], now: float) -> Plan:
        """The same for workers on training GPUs that are about to wake; nobody switches for them."""
        stay, _ = _by_zone(self.active())
        if not self.is_settled:
            self._decide_lent(stay, lent, now)
        return Plan(add=tuple(Assignment(row.slot, row.target_role) for row in lent))

    def _decide(self, rows: Sequence[WorkerRow], steps_left: int, lending: Lending, now: float) -> None:
        stay, lent = _by_zone(rows)
        if stay:
            decision = self._ask(len(stay), allocation_of(stay), steps_left, now, lending=lending)
            self._rebind(stay, decision.target, decision, now)
        if lent:
            decision = self._decide_lent(stay, lent, now)
        self._counters.mode_switches += decision.switch == "mode"
        self._counters.ratio_switches += decision.switch == "ratio"

    def _decide_lent(self, stay: Sequence[WorkerRow], lent: Sequence[WorkerRow], now: float) -> Decision:
        """Choose the roles of lent workers beside those that stay, unless these cannot serve by themselves."""
        base = allocation_of(stay)
        if not base.is_whole:
            stay, base = (), Allocation()
        rows = [*stay, *lent]
        decision = self._ask(len(rows), allocation_of(rows), 1, now, base=base if stay else None)
        self._rebind(lent, decision.target.less(base), decision, now)
        return decision

    def _rebind(self, rows: Sequence[WorkerRow], target: Allocation, decision: Decision, now: float) -> None:
        plan = make_plan(_wanted(rows), (), (), target)
        self._adopt(plan.rebind)
        self._counters.role_changes += len(plan.rebind)
        if plan.rebind:
            report_plan(
                self._commands, plan, "mandatory" if decision.forced else "optional", decision.reason, now
            )

    def _adopt(self, assignments: Iterable[Assignment]) -> None:
        for assignment in assignments:
            self._table.rows[assignment.slot].target_role = assignment.role

    def _ask(
        self,
        num_workers: int,
        current: Allocation,
        steps_left: int,
        now: float,
        *,
        base: Allocation | None = None,
        lending: Lending = NOTHING_LENT,
    ) -> Decision:
        cost = SwitchCost(self._state.switch_s or 0.0, max(1.0, float(steps_left)))
        decision = decide(
            self._tracker.profile(),
            num_workers,
            current,
            self._config.elastic,
            cost,
            base=base,
            lending=lending,
            thorough=False,
        )
        best = sorted(decision.candidates, key=lambda candidate: candidate.seconds)[:SHOWN_CANDIDATES]
        self._commands.report(
            DecisionReport(
                now,
                workers=num_workers,
                current=str(current),
                target=str(decision.target),
                predicted_s=decision.seconds,
                switch=decision.switch,
                forced=decision.forced,
                reason=decision.reason,
                candidates=" ".join(
                    f"{c.allocation}={c.seconds:.4g}{'' if c.feasible else '!'}" for c in best
                ),
            )
        )
        return decision

    def allocation(self) -> Allocation:
        """Return the allocation of the active workers, as the newest plan wants it."""
        return allocation_of(self.active())

    # switching

    def _switch(self, joining: set[Slot], now: float) -> None:
        for row in self.active():
            is_wrong = row.role != row.target_role
            if row.status == "serving" and is_wrong and self._may_leave(row):
                self._lifecycle.stop_routing(row, now)
            if row.status == "switching" and not row.op and not row.running:
                self._lifecycle.set_role(
                    row, now
                )  # at once after the cut, too: an idle worker has no event to wait for
            elif row.status == "verified" and is_wrong:
                self._turn(row, joining, now)

    def _turn(self, row: WorkerRow, joining: set[Slot], now: float) -> None:
        """A worker that is not routable at the moment: the best time to switch, unless it is needed as it is."""
        if row.slot not in joining and not self._may_leave(row):
            self._lifecycle.admit(row, now)
        elif not row.running:
            self._lifecycle.set_role(row, now)

    def _may_leave(self, row: WorkerRow) -> bool:
        rest = [other for other in self._table.serving() if other is not row]
        if has_path(rest):
            return self._is_sole(row) or not self._would_strand(rest)
        coming = [r for r in self.active() if r.status != "serving" and r is not row]
        return not coming  # nothing to wait for: this switch is what makes the new path

    def _would_strand(self, rest: Sequence[WorkerRow]) -> bool:
        """Whether the path would hang on colocated workers that must switch too, each the only one for its new role:
        they go first, while another colocated one serves."""
        pools = {other.role for other in rest}
        kept = [other for other in rest if other.role == "colocated"]
        return not {"prefill", "decode"} <= pools and all(self._is_sole(other) for other in kept)

    def _is_sole(self, row: WorkerRow) -> bool:
        if row.target_role == "colocated":
            return False
        return sum(other.target_role == row.target_role for other in self.active()) == 1

    def on_role_set(self, event: events.RoleSet, now: float) -> bool:
        if not self._lifecycle.on_role_set(event, now):
            return False
        self._state.switch_s = ema(self._state.switch_s, event.seconds, self._config.elastic.smoothing)
        return True


def _by_zone(rows: Iterable[WorkerRow]) -> tuple[list[WorkerRow], list[WorkerRow]]:
    """Split workers into those that stay and those on lent training GPUs."""
    stay: list[WorkerRow] = []
    lent: list[WorkerRow] = []
    for row in rows:
        (lent if row.zone == "overlap" else stay).append(row)
    return stay, lent


def _wanted(rows: Iterable[WorkerRow]) -> dict[Slot, Role]:
    return {row.slot: row.target_role for row in rows}


def allocation_of(rows: Iterable[WorkerRow]) -> Allocation:
    roles = [row.target_role for row in rows]
    return Allocation(roles.count("prefill"), roles.count("decode"), roles.count("colocated"))


def has_path(rows: Sequence[WorkerRow]) -> bool:
    """Whether these workers can serve a request from its prompt to its end."""
    roles = {row.role for row in rows}
    return "colocated" in roles or {"prefill", "decode"} <= roles


def report_plan(
    commands_out: CommandBuffer,
    plan: Plan,
    urgency: Literal["mandatory", "optional"],
    reason: str,
    now: float,
) -> None:
    commands_out.report(
        PlanReport(
            now,
            urgency=urgency,
            add=" ".join(f"{a.slot}:{a.role}" for a in plan.add),
            remove=" ".join(str(slot) for slot in plan.remove),
            rebind=" ".join(f"{a.slot}:{a.role}" for a in plan.rebind),
            reason=reason,
        )
    )
