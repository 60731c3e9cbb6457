"""A counter that outlives its process: eight bytes of a mapped file, readable after a kill -9.

A rollout worker counts the tokens it samples here, so that what died unstreamed with it can be told exactly.
"""

import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

ENVIRONMENT_KEY = "PEARL_COUNTER_FILE"
DEFAULT_NAME = "counter"  # in the group's directory, where no other place is named
_U64 = struct.Struct("<Q")


class MmapCounter:
    """The writer. One per process group; not shared between threads."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_U64.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _U64.size)
        self._value = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map.close()

    def add(self, count: int) -> None:
        self._value += count
        _U64.pack_into(self._map, 0, self._value)


def read(path: Path) -> int | None:
    """The last value, or None when the file was never made or is cut short."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return int(_U64.unpack(data)[0]) if len(data) == _U64.size else None
