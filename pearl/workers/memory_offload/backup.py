"""Content of released pages in an anonymous file that nobody maps: host memory, but not this process's resident set."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pearl.workers.memory_offload.pages import Pages, fill

PIECE_BYTES = 4 << 20
MAX_THREADS = 4
"""Copying into fresh pages is bound by page faults, which more cores share; memory bandwidth ends it soon."""
DISCARDING = "discard backup"
"""Name of the thread that frees one."""

FILL_BYTES = 256 << 10
"""Filled at a time, so that what the kernel zeroed is still in the core's own cache when it is written."""
Piece = tuple[int, Pages]
"""(offset in the file, memory)."""


class Backup:
    def __init__(self, ranges: Sequence[Pages]) -> None:
        """Copies the ranges. Raises OSError when there is no room; nothing is left then."""
        self.num_bytes = sum(pages.num_bytes for pages in ranges)
        self._fd = os.memfd_create("pearl-backup", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, self.num_bytes)
            # One thread: the file's lock lets one writer in.
            for offset, pages in _pieces(ranges):
                _all(lambda rest, at: os.pwrite(self._fd, rest, at), offset, pages.data)
        except BaseException:
            self.close()
            raise

    def load(self, ranges: Sequence[Pages]) -> None:
        """Copy back into the same ranges. Raises OSError; what was copied until then stays."""
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads, "restore") as pool:
            for _ in pool.map(self._load, _pieces(ranges)):
                pass

    def _load(self, piece: Piece) -> None:
        offset, whole = piece
        for pages in whole.split(FILL_BYTES):
            fill(pages)
            _all(lambda rest, at: os.preadv(self._fd, (rest,), at), offset, pages.data)
            offset += pages.num_bytes

    def discard(self) -> None:
        """Close in a thread: giving back that many small pages takes as long as reading them."""
        threading.Thread(target=self.close, name=DISCARDING, daemon=True).start()

    def close(self) -> None:
        """Release the memory. Repeated calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pieces(ranges: Sequence[Pages]) -> Iterator[Piece]:
    offset = 0
    for whole in ranges:
        for pages in whole.split(PIECE_BYTES):
            yield offset, pages
            offset += pages.num_bytes


def _all(move: Callable[[memoryview, int], int], offset: int, data: memoryview) -> None:
    """One call moves as much as the system likes."""
    while data:
        count = move(data, offset)
        if count == 0:
            raise OSError(f"the backup ends at byte {offset}")
        offset, data = offset + count, data[count:]
