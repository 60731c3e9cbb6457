"""Reader of a snapshot on its source's own host: maps the image, holds it while it reads, proves every bucket.

While a ``MappedImage`` is open the source cannot overwrite it, so its views may be loaded without a copy.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat

from pearl.types.weights import BucketSpec, Snapshot, SnapshotSource, Version
from pearl.workers.weight_transfer.errors import SourceGoneError, SupersededError
from pearl.workers.weight_transfer.snapshot_image import MAGIC, TRAILER, file_bytes, trailer_offset


class MappedImage:
    """The image of one version, read-only.

    Raises SourceGoneError when the path is gone or is no image (the process ended, or this is another host) and
    SupersededError when it holds another version by now.
    """

    def __init__(self, snapshot: Snapshot, source: SnapshotSource) -> None:
        self._num_bytes = snapshot.num_bytes
        self._fd = open_image(source.path)
        try:
            self._lock(snapshot, source)
            self._map = mmap.mmap(self._fd, file_bytes(snapshot.num_bytes), prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self._view = memoryview(self._map)

    def _lock(self, snapshot: Snapshot, source: SnapshotSource) -> None:
        where = f"in {source.path}"
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SupersededError(snapshot.version, None, f"{where}, which is being rewritten") from None
        trailer = os.pread(self._fd, TRAILER.size, trailer_offset(snapshot.num_bytes))
        if len(trailer) < TRAILER.size or not trailer.startswith(MAGIC):
            raise SourceGoneError(f"{source.path} holds no snapshot of {snapshot.num_bytes} bytes")
        _, whole, incarnation, lineage, step, num_bytes = TRAILER.unpack(trailer)
        if incarnation != source.incarnation:
            raise SourceGoneError(
                f"{source.path} belongs to incarnation {incarnation}, not {source.incarnation}"
            )
        if not whole or Version(lineage, step) != snapshot.version or num_bytes != snapshot.num_bytes:
            raise SupersededError(snapshot.version, Version(lineage, step), where)

    def bucket(self, spec: BucketSpec) -> memoryview:
        """The bucket's bytes; valid until ``close``."""
        return self._view[spec.offset : spec.offset + spec.num_bytes]

    def close(self) -> None:
        """Let the source reuse the image. Views still held elsewhere stay mapped but may change from here on."""
        if self._fd < 0:
            return
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # explicit: the mapping holds a duplicate of the descriptor
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):  # views are out; the mapping goes with the last of them
            self._view.release()
            self._map.close()


def open_image(path: str) -> int:
    """Open read-only without ever blocking: the number may by now name a pipe or a terminal."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "?")
        raise SourceGoneError(
            f"{path} cannot be opened ({code}): its process ended or is not here"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SourceGoneError(f"{path} is no snapshot image")
    return fd
