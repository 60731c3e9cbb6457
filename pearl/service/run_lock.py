"""One coordinator a run directory: a lock for as long as it lives, and the run's id, which outlives it."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InUseError(ValueError):
    """Another coordinator runs in that directory."""


@contextmanager
def claim(run_dir: Path) -> Iterator[str]:
    """Hold the directory; gives the run's id, the same in every life of the run.

    The lock goes with the process, however it ends.

    Raises:
        InUseError: it is held by another process.
    """
    fd = os.open(run_dir / "run_id", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(
                f"{run_dir}: a coordinator runs in it; stop that one first, or use another run directory"
            ) from None
        yield _run_id(fd)
    finally:
        os.close(fd)


def _run_id(fd: int) -> str:
    known = os.pread(fd, 64, 0).decode("ascii", errors="replace").strip()
    if known:
        return known
    fresh = secrets.token_hex(8)
    os.pwrite(fd, fresh.encode() + b"\n", 0)
    return fresh
