"""Whether a file system has room, asked before anything is written to it."""

import errno
import os
from pathlib import Path

SPARE_BYTES = 16 << 20
"""For descriptions, and for what others write meanwhile."""


class NoSpaceError(OSError):
    """The file system is too full for what was to be written."""

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            errno.ENOSPC,
            f"{needed_bytes / 1e9:.3f} GB are needed and {free_bytes / 1e9:.3f} GB are free",
            str(path),
        )


def require_space(directory: Path, num_bytes: int) -> None:
    """Raise NoSpaceError unless ``directory``, which exists, has room for ``num_bytes`` and a little more."""
    found = os.statvfs(directory)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < num_bytes + SPARE_BYTES:
        raise NoSpaceError(directory, num_bytes + SPARE_BYTES, free_bytes)
