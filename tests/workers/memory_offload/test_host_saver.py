"""Memory leaves and comes back on a CPU host, counted by the kernel."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pearl.workers.memory_offload.backup import DISCARDING
from pearl.workers.memory_offload.errors import NoRoomError, NotFreedError, ResidencyError, StateChangedError
from pearl.workers.memory_offload.host_saver import HostSaver
from pearl.workers.memory_offload.pages import (
    PAGE,
    Pages,
    process_bytes,
    resident_bytes,
    whole_pages,
    zero_edges,
)
from pearl.workers.memory_offload.saver import Restored
from pearl.workers.memory_offload.storages import digest, distinct_storages

MIB = 1 << 20


def state(num_bytes: int = 8 * MIB) -> list[torch.Tensor]:
    """Of several dtypes and sizes, one smaller than a page, one empty, one a view of another."""
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(num_bytes // 4, generator=generator)
    half = torch.randn(num_bytes // 8, generator=generator).bfloat16()
    return [big, half, torch.arange(5), torch.empty(0), big[100:200].view(10, 10), torch.tensor(3.0)]


def bits(tensors: list[torch.Tensor]) -> str:
    return digest(distinct_storages(tensors))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_content_and_addresses_come_back() -> None:
    saver, tensors = HostSaver(), state()
    addresses, before = [tensor.data_ptr() for tensor in tensors], bits(tensors)
    total = sum(storage.nbytes() for storage in distinct_storages(tensors))
    released = saver.release("state", tensors, keep=True, verify=True)
    assert saver.is_released("state")
    assert released.num_bytes >= 0.95 * total
    restored = saver.restore("state")
    assert not saver.is_released("state")
    assert restored.restore_s > 0 < restored.verify_s
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert bits(tensors) == before
    assert torch.equal(tensors[4].flatten(), tensors[0][100:200])


def test_the_resident_set_of_the_process_falls_by_95_percent_of_it() -> None:
    saver, tensors = HostSaver(), [torch.ones(64 * MIB // 4) for _ in range(2)]
    before = process_bytes()
    released = saver.release("state", tensors, keep=True)
    fallen = before - process_bytes()
    assert fallen >= 0.95 * 128 * MIB
    assert abs(fallen - released.num_bytes) <= 0.05 * 128 * MIB
    saver.restore("state")
    assert process_bytes() >= before - 0.05 * 128 * MIB
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_what_is_not_kept_comes_back_as_zeros_without_a_backup() -> None:
    saver, tensors = HostSaver(), state()
    files = open_files()
    assert saver.release("cache", tensors, keep=False).num_bytes > 0
    assert open_files() == files
    saver.restore("cache")
    assert not any(bool(tensor.count_nonzero()) for tensor in tensors)


def test_the_backup_goes_with_the_restore() -> None:
    saver, tensors = HostSaver(), state()
    files = open_files()
    for _ in range(3):
        saver.release("state", tensors, keep=True)
        assert open_files() == files + 1
        saver.restore("state")
        for thread in threading.enumerate():
            if thread.name == DISCARDING:
                thread.join()
        assert open_files() == files


def test_tags_are_independent_and_repeats_do_nothing() -> None:
    saver, one, two = HostSaver(), state(), state()
    before = bits(two)
    assert saver.restore("one") == Restored()
    saver.release("one", one, keep=False)
    saver.release("two", two, keep=True)
    assert saver.release("two", two, keep=True).num_bytes == 0
    saver.restore("one")
    assert saver.is_released("two")
    saver.restore("two")
    assert bits(two) == before


def test_nothing_at_all_can_be_released() -> None:
    saver = HostSaver()
    assert saver.release("state", [], keep=True, verify=True).num_bytes == 0
    saver.restore("state")
    assert not saver.is_released("state")


@pytest.mark.scenario("MH-01")
def test_a_release_that_frees_nothing_is_an_error_and_the_content_comes_back() -> None:
    saver, tensors = HostSaver(drop_pages=lambda pages: None), state()
    before = bits(tensors)
    with pytest.raises(NotFreedError, match=r"state: \d+ of \d+ bytes are still in memory"):
        saver.release("state", tensors, keep=True)
    saver.restore("state")
    assert bits(tensors) == before


@pytest.mark.scenario("MH-01")
def test_pages_that_the_system_keeps_are_an_error() -> None:
    def refuse(pages: Pages) -> None:
        raise OSError(22, "madvise: Invalid argument")

    with pytest.raises(NotFreedError, match="does not take its pages back"):
        HostSaver(drop_pages=refuse).release("state", state(), keep=False)


@pytest.mark.scenario("MH-02")
def test_a_restore_waits_for_nobody_and_may_be_tried_again() -> None:
    free = 10 * MIB
    saver, tensors = HostSaver(free_bytes=lambda: free), state()
    before = bits(tensors)
    saver.release("state", tensors, keep=True, verify=True)
    ranges = [whole_pages(s.data_ptr(), s.nbytes()) for s in distinct_storages(tensors)]
    for _ in range(3):
        with pytest.raises(NoRoomError, match=rf"come back and {free} are free; whoever has the memory"):
            saver.restore("state")
        assert saver.is_released("state")
        assert resident_bytes([pages for pages in ranges if pages.num_bytes]) == 0
    free = 1 << 40
    saver.restore("state")
    assert bits(tensors) == before


@pytest.mark.scenario("MH-02")
def test_a_restore_that_breaks_half_way_leaves_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, tensors = HostSaver(), state()
    before = bits(tensors)
    saver.release("state", tensors, keep=True)
    ranges = [whole_pages(s.data_ptr(), s.nbytes()) for s in distinct_storages(tensors)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", breaking(os.preadv, calls=2))
        with pytest.raises(ResidencyError, match=r"Cannot allocate\); it stays released"):
            saver.restore("state")
    assert saver.is_released("state")
    assert resident_bytes([pages for pages in ranges if pages.num_bytes]) == 0
    saver.restore("state")
    assert bits(tensors) == before


@pytest.mark.scenario("MH-02")
def test_a_backup_without_room_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, tensors = HostSaver(), state()
    before, files = bits(tensors), open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", breaking(os.pwrite, calls=1))
        with pytest.raises(ResidencyError, match="no room for a backup"):
            saver.release("state", tensors, keep=True)
    assert not saver.is_released("state")
    assert (bits(tensors), open_files()) == (before, files)


def breaking(call: Callable[..., int], calls: int) -> Callable[..., int]:
    left = [calls]

    def broken(*arguments: object) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(12, "Cannot allocate")
        return call(*arguments)

    return broken


def test_state_that_came_back_changed_is_found() -> None:
    saver, tensors = HostSaver(), state()
    saver.release("state", tensors, keep=True, verify=True)
    tensors[2][0] = 7  # smaller than a page: it never left
    with pytest.raises(StateChangedError, match="replace this process"):
        saver.restore("state")


def test_pages_lie_whole_inside_their_block() -> None:
    assert whole_pages(PAGE, 2 * PAGE) == Pages(PAGE, 2 * PAGE)
    assert whole_pages(PAGE + 64, 2 * PAGE) == Pages(2 * PAGE, PAGE)
    assert whole_pages(PAGE + 64, PAGE).num_bytes == 0
    assert whole_pages(PAGE + 64, 100).num_bytes == 0


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("count", [100, 3 * PAGE])
def test_edges_are_zeroed_and_nothing_beside_them(offset: int, count: int) -> None:
    memory = torch.ones(6 * PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE + offset
    zero_edges(memory.data_ptr() + start, count)
    inner = whole_pages(memory.data_ptr() + start, count)
    assert int((memory == 0).sum()) == count - inner.num_bytes
    assert not bool((memory[:start] == 0).any() or (memory[start + count :] == 0).any())


def test_no_map_of_the_backup_is_left(tmp_path: Path) -> None:
    saver, tensors = HostSaver(), state()
    saver.release("state", tensors, keep=True)
    assert "pearl-backup" not in Path("/proc/self/maps").read_text()
    saver.restore("state")
