"""The worker table's literal moves and invariants."""

from typing import get_args

import pytest

from pearl.types.ids import GpuId, Incarnation, Slot
from pearl.types.weights import Version
from pearl.types.worker_table import INACTIVE, TRANSITIONS, WorkerStatus, WorkerTable


def table_of(num_slots: int) -> WorkerTable:
    table = WorkerTable()
    for i in range(num_slots):
        table.add((GpuId(f"host/{i}"),))
    return table


def test_a_slots_whole_life_is_legal() -> None:
    table = table_of(1)
    row = table.rows[Slot(0)]
    life: list[WorkerStatus] = [
        "starting",
        "ready",
        "updating",
        "verified",
        "serving",
        "updating",
        "verified",
        "serving",
        "stopping",
        "gone",
    ]
    for condition in life:
        table.move(row, condition)
    assert row.activity == "inactive"


@pytest.mark.parametrize(
    ("start", "to"),
    [("gone", "serving"), ("ready", "serving"), ("updating", "serving"), ("stopping", "serving")],
)
def test_nothing_serves_without_a_proof(start: WorkerStatus, to: WorkerStatus) -> None:
    table = table_of(1)
    table.rows[Slot(0)].status = start
    with pytest.raises(AssertionError, match="not a legal move"):
        table.move(table.rows[Slot(0)], to)


def test_every_condition_can_end_and_only_serving_is_active() -> None:
    conditions = set(get_args(WorkerStatus))
    assert {c for pair in TRANSITIONS for c in pair} == conditions
    assert {start for start, to in TRANSITIONS if to == "gone"} == conditions - {"gone"}
    row = table_of(1).rows[Slot(0)]
    for condition in conditions:
        row.status = condition
        assert (row.activity == "active") == (condition == "serving")
        assert (row.activity == "inactive") == (condition in INACTIVE)


def test_a_gpu_has_one_running_owner() -> None:
    table = table_of(1)
    table.add((GpuId("host/0"),))
    for row in table.rows.values():
        table.move(row, "starting")
    with pytest.raises(AssertionError, match="two running owners"):
        table.check()


def test_an_old_incarnation_is_not_current() -> None:
    table = table_of(1)
    row = table.rows[Slot(0)]
    row.incarnation = Incarnation(2)
    table.move(row, "starting")
    assert table.current(Slot(0), Incarnation(1)) is None
    assert table.current(Slot(0), Incarnation(2)) is row
    assert table.current(Slot(9), Incarnation(1)) is None


def test_serving_without_a_version_is_refused() -> None:
    table = table_of(1)
    row = table.rows[Slot(0)]
    row.status = "serving"
    with pytest.raises(AssertionError):
        table.check()
    row.version = Version(0, 1)
    table.check()
