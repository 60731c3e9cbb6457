"""The saver of CPU hosts: gives the tensors' pages back to the system, content kept in a file that is not mapped.

A storage keeps its address and its first and last partial page. What is freed is counted by the kernel, page by
page, so that other threads of the process do not blur it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch

from pearl.workers.memory_offload.backup import Backup
from pearl.workers.memory_offload.errors import NoRoomError, NotFreedError, ResidencyError, StateChangedError
from pearl.workers.memory_offload.pages import (
    Pages,
    counts_pages,
    drop,
    process_bytes,
    resident_bytes,
    whole_pages,
    zero_edges,
)
from pearl.workers.memory_offload.saver import MIN_FREED_RATIO, Released, Restored, Stopwatch
from pearl.workers.memory_offload.storages import digest, distinct_storages, total_bytes


@dataclass(frozen=True, slots=True)
class Held:
    """A released tag. The storages are kept alive, so that their addresses stay theirs."""

    storages: list[torch.UntypedStorage]
    ranges: list[Pages]
    backup: Backup | None
    digest: str  # "" = not asked for


class HostSaver:
    def __init__(
        self,
        *,
        free_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
        drop_pages: Callable[[Pages], None] = drop,
    ) -> None:
        """``free_bytes``: memory that can be taken now; ``drop_pages``: how it is given back."""
        self._free_bytes = free_bytes
        self._drop = drop_pages
        self._held: dict[str, Held] = {}

    def is_released(self, tag: str) -> bool:
        return tag in self._held

    def release(
        self, tag: str, tensors: Iterable[torch.Tensor], *, keep: bool, verify: bool = False
    ) -> Released:
        """Release as ``saver`` says: ``keep`` backs the content up to a file, ``verify`` compares its digest on
        restore; freeing is checked in any case where page counts exist."""
        if tag in self._held:
            return Released()
        storages = distinct_storages(tensors)
        ranges = [whole_pages(storage.data_ptr(), storage.nbytes()) for storage in storages]
        ranges = [pages for pages in ranges if pages.num_bytes]
        clock = Stopwatch()
        content = digest(storages) if keep and verify else ""
        verify_s = clock.lap()
        backup = self._back_up(tag, ranges) if keep else None
        backup_s = clock.lap()
        resident = resident_bytes(ranges) if counts_pages() else process_bytes()
        verify_s += clock.lap()
        self._held[tag] = Held(storages, ranges, backup, content)
        self._drop_all(tag, ranges)
        if not keep:
            for storage in storages:
                zero_edges(storage.data_ptr(), storage.nbytes())
        release_s = clock.lap()
        freed = self._verified(tag, ranges, resident)
        return Released(freed, backup_s, release_s, verify_s + clock.lap())

    def _back_up(self, tag: str, ranges: Sequence[Pages]) -> Backup:
        try:
            return Backup(ranges)
        except OSError as error:
            num_bytes = sum(pages.num_bytes for pages in ranges)
            raise ResidencyError(
                f"{tag}: no room for a backup of {num_bytes} bytes: {error}; it stays where it is"
            ) from error

    def _drop_all(self, tag: str, ranges: Sequence[Pages]) -> None:
        try:
            for pages in ranges:
                self._drop(pages)
        except OSError as error:
            raise NotFreedError(f"{tag}: the system does not take its pages back: {error}") from error

    def _verified(self, tag: str, ranges: Sequence[Pages], before: int) -> int:
        if not counts_pages():
            return max(0, before - process_bytes())
        after = resident_bytes(ranges)
        if after > (1 - MIN_FREED_RATIO) * before:
            raise NotFreedError(
                f"{tag}: {after} of {before} bytes are still in memory after the release (at most "
                f"{1 - MIN_FREED_RATIO:.0%} may be); is memory locked (ulimit -l, mlockall) in this process?"
            )
        return before - after

    def restore(self, tag: str) -> Restored:
        held = self._held.get(tag)
        if held is None:
            return Restored()
        clock = Stopwatch()
        self._check_room(tag, held)
        if held.backup is not None:
            self._load(tag, held, held.backup)
        del self._held[tag]
        restore_s = clock.lap()
        if held.digest and (found := digest(held.storages)) != held.digest:
            raise StateChangedError(
                f"{tag}: digest {found} after the restore, {held.digest} before; replace this process"
            )
        return Restored(restore_s, clock.lap())

    def _check_room(self, tag: str, held: Held) -> None:
        needed, free = total_bytes(held.storages), self._free_bytes()
        if free < needed:
            raise NoRoomError(
                f"{tag}: {needed} bytes are to come back and {free} are free; whoever has the memory must release "
                "it first. Nothing was changed"
            )

    def _load(self, tag: str, held: Held, backup: Backup) -> None:
        try:
            backup.load(held.ranges)
        except BaseException as error:
            for pages in held.ranges:
                self._drop(pages)
            if not isinstance(error, OSError):
                raise
            raise ResidencyError(f"{tag}: did not come back ({error}); it stays released") from error
        backup.discard()
