"""One coordinator a run directory: a lock for as long as it lives, and the run's id, which outlives it.

The lock is on the directory itself, so no file in it can be deleted or replaced to let a second coordinator in. The id
belongs to the directory as well: ``identity.json`` holds it with the directory's device and inode, which a copy does
not share, so a copy of a run is another run and never ends the processes of the first.
"""

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from pearl.service.run_files import replace_file

ID_NAME = "run_id"
IDENTITY_NAME = "identity.json"
_ID = re.compile(r"[0-9a-f]{16}")
_NO_DIRECTORY_LOCKS = (errno.EBADF, errno.EISDIR, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)
"""Of file systems that lock only files that are open for writing, as NFS does."""


class InUseError(ValueError):
    """Another coordinator runs in that directory."""


class Identity(msgspec.Struct, frozen=True):
    """Whose id it is: the directory that had this device and inode when the id was given."""

    run_id: str
    device: int
    inode: int


class Claim(NamedTuple):
    run_id: str
    copied_from: str  # the id of the run that the directory is a copy of; "" = it is no copy


@contextmanager
def claim(run_dir: Path) -> Iterator[Claim]:
    """Hold the directory; gives the run's id, the same in every life of the run.

    The lock goes with the process, however it ends.

    Raises:
        InUseError: it is held by another process.
    """
    directory_fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fds = [directory_fd]
    try:
        with _tolerating(*_NO_DIRECTORY_LOCKS):
            _lock(directory_fd, run_dir)
        # The file's lock is what keeps hosts apart that share the directory over a network.
        fds.append(os.open(run_dir / ID_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        with _tolerating(errno.ENOLCK, errno.EOPNOTSUPP):
            _lock(fds[-1], run_dir)
        yield _identify(run_dir, os.fstat(directory_fd))
    finally:
        for fd in fds:
            os.close(fd)


def _lock(fd: int, run_dir: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError(
            f"{run_dir}: a coordinator runs in it; stop that one first, or use another run directory"
        ) from None


@contextmanager
def _tolerating(*codes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise


def _identify(run_dir: Path, directory: os.stat_result) -> Claim:
    known = _read(run_dir / IDENTITY_NAME)
    is_own = known is not None and (known.device, known.inode) == (directory.st_dev, directory.st_ino)
    run_id = known.run_id if known is not None and is_own else secrets.token_hex(8)
    if not is_own:
        identity = Identity(run_id, directory.st_dev, directory.st_ino)
        replace_file(run_dir / IDENTITY_NAME, msgspec.json.encode(identity) + b"\n")
    # Written in place: the lock is held on this very file.
    (run_dir / ID_NAME).write_text(run_id + "\n", encoding="ascii")
    return Claim(run_id, known.run_id if known is not None and not is_own else "")


def _read(path: Path) -> Identity | None:
    """None when it is not there or does not hold what was written: an id of unknown origin is not used again."""
    with suppress(OSError, msgspec.DecodeError):
        identity = msgspec.json.decode(path.read_bytes(), type=Identity)
        if _ID.fullmatch(identity.run_id):
            return identity
    return None
