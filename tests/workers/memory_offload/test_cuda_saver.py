"""The saver of GPUs: its bookkeeping with stand-ins for library and driver; the real ones where there is a GPU."""

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch

from pearl.workers.memory_offload.cuda_saver import CudaSaver
from pearl.workers.memory_offload.errors import NoRoomError, NotFreedError, ResidencyError
from pearl.workers.memory_offload.host_saver import HostSaver
from pearl.workers.memory_offload.saver_for import saver_for
from pearl.workers.memory_offload.storages import digest, distinct_storages

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def state(num_bytes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(num_bytes // 4, generator=generator)
    return [
        big,
        big[10:20],
        torch.randn(num_bytes // 4, generator=generator),
        torch.arange(5),
        torch.empty(0),
    ]


def bits(tensors: list[torch.Tensor]) -> str:
    return digest(distinct_storages(tensors))


class Library:
    """Keeps books of what torch_memory_saver is asked; the memory itself stays on the host."""

    def __init__(self, frees: bool = True) -> None:
        self.calls: list[str] = []
        self.free = 100 * MIB
        self.inside = ""
        self._frees = frees

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        self.calls.append(f"region {tag} {enable_cpu_backup}")
        yield

    def pause(self, tag: str) -> None:
        self.calls.append(f"pause {tag}")
        if self._frees:
            self.free += 20 * MIB

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")
        self.free -= 20 * MIB


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return driven(monkeypatch, Library())


def driven(monkeypatch: pytest.MonkeyPatch, library: Library) -> Library:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (library.free, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda device: "process 77 uses 120 MB")
    return library


def test_storages_move_into_the_region_once_and_tensors_stay_valid(library: Library) -> None:
    saver, tensors = CudaSaver(DEVICE, library), state(8 * MIB)
    before = [tensor.clone() for tensor in tensors]
    assert saver.release("state", tensors, keep=True).num_bytes == 20 * MIB
    assert library.calls == ["region state.kept True"] * 3 + ["pause state.kept"]
    saver.restore("state")
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    assert torch.equal(tensors[1], tensors[0][10:20])
    library.calls.clear()
    late = torch.ones(MIB)  # optimizer state appears with the first step
    saver.release("state", [*tensors, late], keep=True)
    assert library.calls == ["region state.kept True", "pause state.kept"]


def test_what_is_not_kept_comes_back_as_zeros(library: Library) -> None:
    saver, tensors = CudaSaver(DEVICE, library), state(8 * MIB)
    saver.release("cache", tensors, keep=False)
    saver.restore("cache")
    assert library.calls[-2:] == ["pause cache", "resume cache"]
    assert not any(bool(tensor.count_nonzero()) for tensor in tensors)


def test_nothing_is_asked_of_the_library_for_nothing(library: Library) -> None:
    saver = CudaSaver(DEVICE, library)
    saver.release("cache", [], keep=False)
    saver.restore("cache")
    assert library.calls == []


@pytest.mark.scenario("MH-01")
def test_memory_that_the_driver_does_not_report_free_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = driven(monkeypatch, Library(frees=False))
    saver, tensors = CudaSaver(DEVICE, library), state(8 * MIB)
    with pytest.raises(NotFreedError, match=r"0 of \d+ bytes of cuda:0 were freed .*expandable_segments"):
        saver.release("state", tensors, keep=True)
    assert saver.is_released("state")


@pytest.mark.scenario("MH-02", "MH-08")
def test_a_restore_without_room_names_the_holder_and_may_be_tried_again(library: Library) -> None:
    saver, tensors = CudaSaver(DEVICE, library), state(8 * MIB)
    saver.release("state", tensors, keep=True)
    library.free = MIB
    with pytest.raises(NoRoomError, match=f"cuda:0 and {MIB} are free.*process 77"):
        saver.restore("state")
    assert not any(call.startswith("resume") for call in library.calls)
    library.free = 100 * MIB
    saver.restore("state")
    assert not saver.is_released("state")


def test_a_gpu_without_its_library_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(ResidencyError, match=r"pip install 'pearl\[cuda\]'"):
        saver_for(torch.device("cuda", 0))
    assert isinstance(saver_for(torch.device("cpu")), HostSaver)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.scenario("MH-01")
def test_a_gpu_is_freed_and_filled_again() -> None:
    device = DEVICE
    saver = CudaSaver(device)
    tensors = [tensor.to(device) for tensor in state(128 * MIB)]
    before = bits(tensors)
    for _ in range(2):
        free = torch.cuda.mem_get_info(device)[0]
        saver.release("state", tensors, keep=True, verify=True)
        assert torch.cuda.mem_get_info(device)[0] - free >= 0.95 * 256 * MIB
        saver.restore("state")
        assert bits(tensors) == before
