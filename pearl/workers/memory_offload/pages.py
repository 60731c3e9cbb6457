"""Pages of this process's own memory: given back to the system, counted, addressed. Linux only.

What an allocator handed out as one block contains whole pages that belong to that block alone. Dropping those is
invisible to the allocator: the addresses stay reserved and read as zeros until somebody writes.
"""

import ctypes
import functools
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PAGE = mmap.PAGESIZE
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which ``mmap`` does not name."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Pages:
    """Whole pages inside one block of memory."""

    address: int
    num_bytes: int

    @property
    def data(self) -> memoryview:
        """Writable; keeps nothing alive."""
        return _bytes_at(self.address, self.num_bytes)

    def split(self, num_bytes: int) -> Iterator["Pages"]:
        """Split into pieces of so many bytes, whole pages each."""
        for start in range(0, self.num_bytes, num_bytes):
            yield Pages(self.address + start, min(num_bytes, self.num_bytes - start))


def whole_pages(address: int, num_bytes: int) -> Pages:
    """Return the pages that lie entirely in the block; possibly none."""
    start = -(-address // PAGE) * PAGE
    return Pages(start, max(0, (address + num_bytes) // PAGE * PAGE - start))


def zero_edges(address: int, num_bytes: int) -> None:
    """Zero what of the block lies outside its whole pages."""
    inner = whole_pages(address, num_bytes)
    if not inner.num_bytes:
        ctypes.memset(address, 0, num_bytes)
        return
    end = inner.address + inner.num_bytes
    ctypes.memset(address, 0, inner.address - address)
    ctypes.memset(end, 0, address + num_bytes - end)


def drop(pages: Pages) -> None:
    """Give the memory back; reads as zeros from here on."""
    _advise(pages, mmap.MADV_DONTNEED)


def fill(pages: Pages) -> None:
    """Take memory for all of them at once instead of at each first touch. A hint: older kernels do not know it."""
    _libc.madvise(pages.address, pages.num_bytes, POPULATE_WRITE)


def resident_bytes(ranges: Sequence[Pages]) -> int:
    """Return how many bytes of the ranges are in memory, as counted by the kernel."""
    return sum(_resident(pages) for pages in ranges) * PAGE


@functools.cache
def counts_pages() -> bool:
    """False where the kernel (an emulated one) calls every mapped page resident."""
    with mmap.mmap(-1, 4 * PAGE) as untouched:
        view = (ctypes.c_char * len(untouched)).from_buffer(untouched)
        resident = _resident(Pages(ctypes.addressof(view), len(untouched)))
        del view
    return resident == 0


def process_bytes() -> int:
    """Resident memory of the whole process. The sum over its maps is exact; statm's counters lag by megabytes."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))


def _resident(pages: Pages) -> int:
    flags = np.zeros(pages.num_bytes // PAGE, np.uint8)
    if _libc.mincore(pages.address, pages.num_bytes, flags.ctypes.data):
        raise _error("mincore")
    return int(np.count_nonzero(flags & 1))


def _advise(pages: Pages, advice: int) -> None:
    if _libc.madvise(pages.address, pages.num_bytes, advice):
        raise _error("madvise")


def _bytes_at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
