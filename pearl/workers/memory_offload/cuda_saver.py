"""The saver of GPUs: torch_memory_saver unmaps the physical memory and keeps the virtual addresses.

A storage is moved into a region of its tag when it is first released, in place: every tensor on it stays valid. That
gives it its last address, so CUDA graphs and registered buffers must be made from it afterwards.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pearl.workers.memory_offload.errors import NoRoomError, NotFreedError, ResidencyError, StateChangedError
from pearl.workers.memory_offload.saver import MIN_FREED_RATIO, Released, Restored, Stopwatch
from pearl.workers.memory_offload.storages import digest, distinct_storages, storage_bytes, total_bytes


@dataclass(frozen=True, slots=True)
class Held:
    storages: list[torch.UntypedStorage]
    keep: bool
    digest: str


class CudaSaver:
    def __init__(self, device: torch.device, library: Any = None) -> None:
        """``library`` is the memory saver's singleton; imported when it is not given. Raises ResidencyError."""
        self._device = device
        self._library = _load_library() if library is None else library
        self._placed: dict[tuple[str, bool], list[StorageWeakRef]] = {}
        self._held: dict[str, Held] = {}

    def is_released(self, tag: str) -> bool:
        return tag in self._held

    def release(
        self, tag: str, tensors: Iterable[torch.Tensor], *, keep: bool, verify: bool = False
    ) -> Released:
        if tag in self._held:
            return Released()
        storages = distinct_storages(tensors)
        clock = Stopwatch()
        content = digest(storages) if keep and verify else ""
        verify_s = clock.lap()
        self._place(tag, storages, keep)
        backup_s = clock.lap()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = self._free_bytes()
        self._held[tag] = Held(storages, keep, content)
        if storages:
            self._library.pause(_region(tag, keep))
        release_s = clock.lap()
        freed = self._verified(tag, total_bytes(storages), before)
        return Released(freed, backup_s, release_s, verify_s + clock.lap())

    def _place(self, tag: str, storages: Sequence[torch.UntypedStorage], keep: bool) -> None:
        """Move storages that are not in the tag's region yet into it."""
        living = [ref for ref in self._placed.get((tag, keep), []) if not ref.expired()]  # type: ignore[no-untyped-call]
        known = {ref.cdata for ref in living}
        new = [storage for storage in storages if storage._cdata not in known]
        for storage in new:
            self._move(storage, _region(tag, keep), keep)
        self._placed[tag, keep] = living + [StorageWeakRef(storage) for storage in new]  # type: ignore[no-untyped-call]

    def _move(self, storage: torch.UntypedStorage, region: str, keep: bool) -> None:
        num_bytes = storage.nbytes()
        content = storage_bytes(storage).to("cpu", copy=True) if keep else None
        storage.resize_(0)
        with self._library.region(tag=region, enable_cpu_backup=keep):
            storage.resize_(num_bytes)
        if content is not None:
            storage_bytes(storage).copy_(content)

    def _verified(self, tag: str, expected: int, before: int) -> int:
        freed = self._free_bytes() - before
        if freed < MIN_FREED_RATIO * expected:
            raise NotFreedError(
                f"{tag}: {freed} of {expected} bytes of {self._device} were freed (at least {MIN_FREED_RATIO:.0%} "
                "must be); is PYTORCH_CUDA_ALLOC_CONF=expandable_segments on, or another process growing there?"
            )
        return freed

    def restore(self, tag: str) -> Restored:
        held = self._held.get(tag)
        if held is None:
            return Restored()
        clock = Stopwatch()
        self._check_room(tag, held)
        if held.storages:
            self._library.resume(_region(tag, held.keep))
        if not held.keep:
            for storage in held.storages:
                storage_bytes(storage).zero_()
        torch.cuda.synchronize(self._device)
        del self._held[tag]
        restore_s = clock.lap()
        if held.digest and (found := digest(held.storages)) != held.digest:
            raise StateChangedError(
                f"{tag}: digest {found} after the restore, {held.digest} before; replace this process"
            )
        return Restored(restore_s, clock.lap())

    def _check_room(self, tag: str, held: Held) -> None:
        """Check for free memory before anything is mapped: the library ends the process when it runs out half-way."""
        torch.cuda.empty_cache()
        needed, free = total_bytes(held.storages), self._free_bytes()
        if free < needed:
            raise NoRoomError(
                f"{tag}: {needed} bytes are to come back to {self._device} and {free} are free; whoever has the "
                f"memory must release it first. Nothing was changed. {torch.cuda.list_gpu_processes(self._device)}"
            )

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]


def _region(tag: str, keep: bool) -> str:
    return f"{tag}.kept" if keep else tag


def _load_library() -> Any:
    try:
        library = importlib.import_module("torch_memory_saver").torch_memory_saver
    except ImportError as error:
        raise ResidencyError(
            "GPU memory cannot be handed over without torch_memory_saver: pip install 'pearl[cuda]', or set "
            'elastic.borrow = "never"'
        ) from error
    library.hook_mode = "torch"  # no LD_PRELOAD needed; graphs are not captured into regions
    return library
