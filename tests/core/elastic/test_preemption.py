"""Which GPUs arrive or are reclaimed on request, and what is refused and how."""

import re

import pytest

from pearl.core.elastic.preemption import choose_gpus
from pearl.types.events import PreemptRequested
from pearl.types.gpu_table import GpuRow, GpuTable, GpuZone
from pearl.types.ids import GpuId


def row(gpu: str, zone: GpuZone = "preemptible", *, present: bool = True, reclaiming: bool = False) -> GpuRow:
    began_s, deadline_s = (1.0, 9.0) if reclaiming else (None, None)
    return GpuRow(GpuId(gpu), zone, present, reclaim_began_s=began_s, reclaim_deadline_s=deadline_s)


ROWS = [
    row("local/0", "training"),
    row("local/1", "dedicated"),
    row("local/2"),
    row("local/3", present=False),
    row("a/0"),
    row("a/1", reclaiming=True),
    row("b/0", present=False),
    row("a/2", present=False),
]
TABLE = GpuTable({row.gpu: row for row in ROWS})
HOSTS = ("a", "local")


def arrive(*gpus: str, count: int = 0) -> PreemptRequested:
    return PreemptRequested(1, "arrive", tuple(map(GpuId, gpus)), count, 30.0, HOSTS)


def reclaim(*gpus: str, count: int = 0, grace_s: float = 30.0) -> PreemptRequested:
    return PreemptRequested(1, "reclaim", tuple(map(GpuId, gpus)), count, grace_s, HOSTS)


def test_arrivals_are_absent_gpus_in_order_on_hosts_that_are_there() -> None:
    assert choose_gpus(arrive(count=2), TABLE, inter=True) == ("local/3", "a/2")
    assert choose_gpus(arrive("a/2"), TABLE, inter=True) == ("a/2",)


def test_a_gpu_that_is_being_reclaimed_comes_back_when_too_few_are_absent() -> None:
    assert choose_gpus(arrive(count=3), TABLE, inter=True) == ("local/3", "a/2", "a/1")


def test_reclaims_are_present_gpus_the_last_first() -> None:
    assert choose_gpus(reclaim(count=2, grace_s=0.0), TABLE, inter=True) == ("a/0", "local/2")


def test_what_is_to_come_back_is_reclaimed_again_when_too_few_are_present() -> None:
    back = row("a/1", reclaiming=True)
    back.is_back = True
    table = GpuTable({one.gpu: one for one in [row("a/0"), back]})
    assert choose_gpus(reclaim(count=2), table, inter=True) == ("a/0", "a/1")
    assert choose_gpus(reclaim("a/1"), table, inter=True) == ("a/1",)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (arrive(count=4), "4 GPU(s) wanted, but 3 can arrive: local/3, a/2, a/1"),
        (arrive("local/2"), "local/2 is there already; those that can arrive: local/3, a/2"),
        (arrive("a/1"), "a/1 is being reclaimed: wait until it has been returned"),
        (arrive("b/0"), "b/0: host b has no agent in the run; start pearl agent there"),
        (arrive("local/1"), "local/1 is not preemptible (dedicated); preemptible are: local/2, local/3, a/0"),
        (arrive("x/0"), 'there is no GPU "x/0"; preemptible are: local/2, local/3, a/0'),
        (reclaim(count=3), "3 GPU(s) wanted, but 2 can be reclaimed: a/0, local/2"),
        (reclaim("local/3"), "local/3 is not there; those that can be reclaimed: local/2, a/0"),
        (reclaim("a/1"), "a/1 is being reclaimed already"),
        (reclaim("a/0", "a/0"), "a GPU is named twice"),
        (reclaim("a/0", count=1), "give either ids of GPUs or how many"),
        (reclaim(), "give either ids of GPUs or how many"),
        (arrive(count=-1), "-1 GPUs: give at least 1"),
        (reclaim("a/0", grace_s=-1.0), "grace of -1.0 s: give seconds from 0 on"),
        (reclaim("a/0", grace_s=float("nan")), "grace of nan s: give seconds from 0 on"),
    ],
)
def test_what_cannot_be_is_refused_with_what_there_is(request_: PreemptRequested, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        choose_gpus(request_, TABLE, inter=True)


def test_arrivals_are_refused_where_nobody_uses_them() -> None:
    with pytest.raises(ValueError, match=r"elastic\.inter = false"):
        choose_gpus(arrive(count=1), TABLE, inter=False)
    assert choose_gpus(reclaim(count=1), TABLE, inter=False)
