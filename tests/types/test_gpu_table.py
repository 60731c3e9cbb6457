"""A GPU has one holder at any time, and only one that is there can be taken."""

import pytest

from pearl.types.gpu_table import TRAINING, GpuTable
from pearl.types.ids import GpuId, Slot

A, B = GpuId("a/0"), GpuId("a/1")


def table() -> GpuTable:
    found = GpuTable()
    found.add(A, "training")
    found.add(B, "preemptible", present=False)
    return found


def test_what_is_taken_is_held_until_its_holder_frees_it() -> None:
    gpus = table()
    gpus.take((A,), TRAINING)
    assert gpus.held_by(TRAINING) == (A,)
    with pytest.raises(AssertionError, match="held by -1, wanted by 3"):
        gpus.take((A,), Slot(3))
    with pytest.raises(AssertionError, match="held by -1, not by 3"):
        gpus.free((A,), Slot(3))
    gpus.free((A,), TRAINING)
    assert gpus.held_by(TRAINING) == ()


def test_gpus_are_taken_together_or_not_at_all() -> None:
    gpus = table()
    with pytest.raises(AssertionError, match="a/1 is not there"):
        gpus.take((A, B), Slot(0))
    assert gpus.rows[A].holder is None


def test_a_gpu_is_usable_while_it_is_there_and_not_to_be_given_back() -> None:
    row = table().rows[B]
    assert not row.usable
    row.present = True
    assert row.usable
    row.reclaim_deadline_s = 5.0
    assert not row.usable


def test_a_gpu_is_known_once_and_tells_its_host() -> None:
    gpus = table()
    with pytest.raises(AssertionError):
        gpus.add(A, "dedicated")
    assert gpus.rows[A].host == "a"
    assert [row.gpu for row in gpus.of_zone("preemptible")] == [B]
