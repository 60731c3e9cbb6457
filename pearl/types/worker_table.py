"""The worker table M = {w -> (G_w, R_w, a_w)} (paper Eq. 4): the only truth about rollout workers.

A slot is bound to its GPUs for life and never renumbered. ``status`` says where a worker is in its life and
``activity`` follows from it; only active workers are routable. The legal moves are the literal table below.
"""

from typing import Literal

import msgspec

from pearl.types.ids import GpuId, Incarnation, OpId, Slot
from pearl.types.plan import Role
from pearl.types.weights import Version

WorkerStatus = Literal[
    "gone",
    "starting",
    "ready",
    "updating",
    "verified",
    "serving",
    "leaving",
    "releasing",
    "asleep",
    "activating",
    "switching",
    "stopping",
]
"""gone: no process; starting: process coming up; ready: up, without proven weights; updating: taking weights;
proven: has them, waits for the group it is admitted with; serving: proven and routable; leaving: cut from routing,
its attempts are being interrupted; releasing: letting go of its device memory; asleep: process without device memory;
activating: taking memory and weights again; switching: finishes what it has, then changes its role; stopping: being
ended."""
Activity = Literal["active", "transitioning", "inactive"]
Zone = Literal["dedicated", "overlap"]

INACTIVE: frozenset[WorkerStatus] = frozenset({"gone", "asleep"})
"""Conditions in which a worker holds none of its GPUs."""
_NEXT: dict[WorkerStatus, tuple[WorkerStatus, ...]] = {
    "gone": ("starting",),
    "starting": ("ready", "stopping", "gone"),
    "ready": ("updating", "releasing", "stopping", "gone"),
    # updating -> ready: the update failed and left it without proven weights
    "updating": ("verified", "ready", "leaving", "releasing", "stopping", "gone"),
    "verified": ("serving", "updating", "switching", "releasing", "stopping", "gone"),
    "serving": ("updating", "switching", "leaving", "releasing", "stopping", "gone"),
    "leaving": ("stopping", "gone"),
    "releasing": ("asleep", "stopping", "gone"),
    "asleep": ("activating", "stopping", "gone"),
    "activating": ("verified", "releasing", "stopping", "gone"),
    "switching": ("verified", "leaving", "releasing", "stopping", "gone"),
    "stopping": ("gone",),
}
TRANSITIONS: frozenset[tuple[WorkerStatus, WorkerStatus]] = frozenset(
    (before, after) for before, others in _NEXT.items() for after in others
)


class WorkerRow(msgspec.Struct):
    slot: Slot
    gpus: tuple[GpuId, ...]
    role: Role = "colocated"
    target_role: Role = "colocated"  # by the newest plan
    zone: Zone = "dedicated"
    status: WorkerStatus = "gone"
    incarnation: Incarnation = Incarnation(0)
    version: Version | None = None  # proven, and served when active
    target: Version | None = None  # being taken while updating
    op: OpId = OpId(0)  # the awaited start or update; 0 = none
    host: str = ""
    pid: int = 0
    running: int = 0  # attempts, or halves of them, sent and not finished
    reserved_tokens: int = 0  # of KV that they may come to need
    streamed_tokens: int = 0  # accepted from this incarnation
    errors: int = 0  # failed attempts in a row
    failed_updates: int = 0  # in a row
    stop_is_planned: bool = False  # being ended for no fault of its own
    failures: list[float] = msgspec.field(default_factory=list)  # times, within the restart window

    @property
    def activity(self) -> Activity:
        if self.status == "serving":
            return "active"
        return "inactive" if self.status in INACTIVE else "transitioning"


class WorkerTable(msgspec.Struct):
    rows: dict[Slot, WorkerRow] = msgspec.field(default_factory=dict)

    def add(self, gpus: tuple[GpuId, ...], zone: Zone = "dedicated") -> WorkerRow:
        """A new slot, with the lowest number never used."""
        slot = Slot(len(self.rows))
        row = self.rows[slot] = WorkerRow(slot=slot, gpus=gpus, zone=zone)
        return row

    def current(self, slot: Slot, incarnation: Incarnation) -> WorkerRow | None:
        """The row when it still is that life of the slot and has a process, else None."""
        row = self.rows.get(slot)
        if row is None or row.incarnation != incarnation or row.status == "gone":
            return None
        return row

    def move(self, row: WorkerRow, to: WorkerStatus) -> None:
        assert (row.status, to) in TRANSITIONS, f"slot {row.slot}: {row.status} -> {to} is not a legal move"
        row.status = to

    def serving(self) -> list[WorkerRow]:
        return [row for row in self.rows.values() if row.status == "serving"]

    def check(self) -> None:
        owners: dict[GpuId, Slot] = {}
        for slot, row in self.rows.items():
            assert slot == row.slot, (slot, row)
            assert row.status not in ("serving", "verified") or row.version is not None, row
            assert row.status not in INACTIVE or row.running == 0, row
            assert (row.target is not None) == (row.status in ("updating", "activating")), row
            if row.status not in INACTIVE:
                for gpu in row.gpus:
                    assert gpu not in owners, f"GPU {gpu} has two running owners: {owners[gpu]}, {slot}"
                    owners[gpu] = slot
