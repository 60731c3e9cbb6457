"""Takes the memory from under tensors and gives it back. One object a process and device; not thread-safe.

Content is released under a tag and comes back by it. A tag is all there or all released: a restore that fails
leaves it released and may be tried again; a state that came back changed is an error that the process does not
survive, its owner must be replaced.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

MIN_FREED_RATIO = 0.95
"""A release that frees less of what it took than this is no release: whoever comes next would run out of memory."""


@dataclass(frozen=True, slots=True)
class Released:
    num_bytes: int = 0  # measured; pages that were never touched held no memory
    backup_s: float = 0.0
    release_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Restored:
    restore_s: float = 0.0
    verify_s: float = 0.0


class Saver(Protocol):
    def release(
        self, tag: str, tensors: Iterable[torch.Tensor], *, keep: bool, verify: bool = False
    ) -> Released:
        """Free the memory of the tensors' whole storages, and prove it. Nobody may touch them until ``restore``.

        Args:
            keep: the content comes back; otherwise the memory comes back as zeros, and there is no backup.
            verify: a digest of the kept content is compared after the restore.

        A tag that is released stays so; that costs nothing. A storage belongs to at most one released tag.

        Raises:
            NotFreedError: the memory is not free. The tag counts as released.
            ResidencyError: there is no room for the backup. Nothing was changed.
        """
        ...

    def restore(self, tag: str) -> Restored:
        """Undo ``release``; nothing happens to a tag that is not released.

        Raises:
            NoRoomError: the tag stays released.
            StateChangedError: see there.
        """
        ...

    def is_released(self, tag: str) -> bool: ...


class Stopwatch:
    """Times the parts of a hand-over."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
