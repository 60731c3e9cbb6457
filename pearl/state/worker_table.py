"""The worker table M = {w -> (G_w, R_w, a_w)} (paper Eq. 4): the only truth about rollout workers.

A slot is bound to its GPUs for life and never renumbered. ``condition`` says where a worker is in its life and
``activity`` follows from it; only active workers are routable. The legal moves are the literal table below.
"""

from typing import Literal

import msgspec

from pearl.state.ids import GpuId, Incarnation, OpId, Slot
from pearl.state.weights import Version

Condition = Literal["gone", "starting", "ready", "updating", "serving", "stopping"]
"""gone: no process; starting: process coming up; ready: up, without proven weights; updating: taking weights;
serving: proven and routable; stopping: being ended."""
Activity = Literal["active", "transitioning", "inactive"]
Zone = Literal["dedicated", "overlap"]

ACTIVITY: dict[Condition, Activity] = {
    "gone": "inactive",
    "starting": "transitioning",
    "ready": "transitioning",
    "updating": "transitioning",
    "serving": "active",
    "stopping": "transitioning",
}
TRANSITIONS: frozenset[tuple[Condition, Condition]] = frozenset(
    {
        ("gone", "starting"),
        ("starting", "ready"),
        ("ready", "updating"),
        ("updating", "serving"),
        ("updating", "ready"),  # the update failed and left it without proven weights
        ("serving", "updating"),
        ("starting", "stopping"),
        ("ready", "stopping"),
        ("updating", "stopping"),
        ("serving", "stopping"),
        ("starting", "gone"),
        ("ready", "gone"),
        ("updating", "gone"),
        ("serving", "gone"),
        ("stopping", "gone"),
    }
)


class WorkerRow(msgspec.Struct):
    slot: Slot
    gpus: tuple[GpuId, ...]
    role: str = "colocated"
    zone: Zone = "dedicated"
    condition: Condition = "gone"
    incarnation: Incarnation = Incarnation(0)
    version: Version | None = None  # proven, and served when active
    target: Version | None = None  # being taken while updating
    op: OpId = OpId(0)  # the awaited start or update; 0 = none
    host: str = ""
    pid: int = 0
    running: int = 0  # attempts sent and not finished
    streamed_tokens: int = 0  # accepted from this incarnation
    errors: int = 0  # failed attempts in a row
    failed_updates: int = 0  # in a row
    losses: list[float] = msgspec.field(default_factory=list)  # times, within the restart window

    @property
    def activity(self) -> Activity:
        return ACTIVITY[self.condition]


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
        if row is None or row.incarnation != incarnation or row.condition == "gone":
            return None
        return row

    def move(self, row: WorkerRow, to: Condition) -> None:
        assert (row.condition, to) in TRANSITIONS, (
            f"slot {row.slot}: {row.condition} -> {to} is not a legal move"
        )
        row.condition = to

    def serving(self) -> list[WorkerRow]:
        return [row for row in self.rows.values() if row.condition == "serving"]

    def check(self) -> None:
        owners: dict[GpuId, Slot] = {}
        for slot, row in self.rows.items():
            assert slot == row.slot, (slot, row)
            assert row.condition != "serving" or row.version is not None, row
            assert row.condition != "gone" or row.running == 0, row
            assert (row.target is not None) == (row.condition == "updating"), row
            if row.condition != "gone":
                for gpu in row.gpus:
                    assert gpu not in owners, f"GPU {gpu} has two running owners: {owners[gpu]}, {slot}"
                    owners[gpu] = slot
