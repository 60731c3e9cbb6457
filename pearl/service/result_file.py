"""A file of lines that a run adds to: it knows what it has written and whether the disk still has it."""

import os
from pathlib import Path

import xxhash

READ_BYTES = 1 << 20


class ResultFile:
    """The one writer of the file. Lines gather until ``flush``; an existing file is continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending = bytearray()
        self._is_draft = False
        self._fd = _open(path)
        self._digest = _digest_of(path, None)
        self._size = os.fstat(self._fd).st_size

    @property
    def size(self) -> int:
        """Bytes written, without what is pending."""
        return self._size

    @property
    def digest(self) -> str:
        """Return the digest of all that was written, in hexadecimal."""
        return self._digest.hexdigest()

    def append(self, line: bytes) -> None:
        self._pending += line

    def flush(self) -> None:
        """Everything so far is with the OS on return. After an OSError the run must end."""
        while self._pending:
            written = os.write(self._fd, self._pending)
            self._digest.update(memoryview(self._pending)[:written])
            self._size += written
            del self._pending[:written]

    def cut(self, size: int, digest: str | None) -> str:
        """Take back what was written after ``size`` bytes. Returns what is wrong with those bytes, "" when all is well;
        then nothing was changed."""
        self.flush()
        there = os.stat(self.path).st_size
        if there < size:
            return f"{self.path} has {there} bytes, not the {size} of the last snapshot"
        kept = _digest_of(self.path, size)
        if digest is not None and kept.hexdigest() != digest:
            return f"{self.path} does not hold what was written: its first {size} bytes were changed"
        os.ftruncate(self._fd, size)
        self._digest, self._size = kept, size
        return ""

    def reset_tokens(self) -> None:
        """Write from the start, beside the old file, until ``put_in_place``."""
        os.close(self._fd)
        draft = self._draft()
        draft.unlink(missing_ok=True)
        self._fd = _open(draft)
        self._is_draft = True
        self._pending.clear()
        self._digest, self._size = xxhash.xxh3_64(), 0

    def put_in_place(self) -> None:
        """Replace the old file by what was written again."""
        assert self._is_draft
        self.flush()
        os.fsync(self._fd)
        os.replace(self._draft(), self.path)
        self._is_draft = False

    def damage(self) -> str:
        """Return what has happened to the file on disk; "" when it holds exactly what was written."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._fd)
        except FileNotFoundError:
            return f"{self.path} was deleted"
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            return f"{self.path} was replaced"
        if there.st_size != self._size:
            return f"{self.path} has {there.st_size} bytes, {self._size} were written"
        if _digest_of(self.path, None).hexdigest() != self.digest:
            return f"{self.path} was changed"
        return ""

    def close(self) -> None:
        """Close the file; what was not flushed is lost, as in a crash. Repeated calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _draft(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _digest_of(path: Path, size: int | None) -> xxhash.xxh3_64:
    """Digest the first ``size`` bytes, or all."""
    digest = xxhash.xxh3_64()
    left = os.stat(path).st_size if size is None else size
    with path.open("rb") as file:
        while piece := file.read(min(READ_BYTES, left)):
            digest.update(piece)
            left -= len(piece)
    return digest
