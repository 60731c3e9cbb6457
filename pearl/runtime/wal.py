"""Append-only files of checked records, in numbered segments of one directory: ``000001.msgpack``, ...

A record is four MessagePack values, so that any MessagePack reader can stream a segment: an array head, then
xxh32 of the length, xxh3-64 of the payload, and the payload as bin32. A crash can only cut the last record short
(or leave zeros there); anything else that does not check is damage and refused, never skipped.
"""

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import xxhash

SUFFIX = ".msgpack"
_HEAD = struct.Struct(">BBIBQBI")  # fixarray(3), uint32, uint64, bin32 length
_ARRAY, _UINT32, _UINT64, _BIN32 = 0x93, 0xCE, 0xCF, 0xC6
_NAME = re.compile(r"\d{6,}" + re.escape(SUFFIX))


class DamagedError(Exception):
    """A segment does not hold what was written; the message names the file and the offset."""


class Record(msgspec.Struct, frozen=True):
    offset: int  # of the record's first byte
    end: int  # offset of the next record
    payload: bytes


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}{SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """Segments that are there, in order. ValueError when one is missing in between."""
    names = (path.name for path in directory.iterdir())
    numbers = sorted(int(name.removesuffix(SUFFIX)) for name in names if _NAME.fullmatch(name))
    if numbers and numbers[-1] - numbers[0] + 1 != len(numbers):
        missing = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
        raise ValueError(
            f"{directory}: segments {missing} are missing; restore them or use another run directory"
        )
    return numbers


def frame(payload: bytes) -> bytes:
    """The record that holds ``payload``."""
    length = len(payload)
    length_check = xxhash.xxh32_intdigest(length.to_bytes(4, "big"))
    check = xxhash.xxh3_64_intdigest(payload)
    return _HEAD.pack(_ARRAY, _UINT32, length_check, _UINT64, check, _BIN32, length) + payload


def read_segment(path: Path, *, may_be_torn: bool) -> Iterator[Record]:
    """All whole records. DamagedError at the first that does not check.

    Args:
        may_be_torn: end quietly at a record that the end of the file cuts short; so for the newest segment only.
    """
    data = path.read_bytes()
    offset = 0
    while offset < len(data):
        record = _read_record(path, data, offset)
        if record is None:
            if not may_be_torn:
                raise DamagedError(f"{path}: the record at offset {offset} is cut short")
            return
        yield record
        offset = record.end


def whole_bytes(path: Path) -> int:
    """Length of the newest segment without a torn last record."""
    end = 0
    for record in read_segment(path, may_be_torn=True):
        end = record.end
    return end


def cut_torn_tail(path: Path) -> int:
    """Remove a torn last record for good. Returns how many bytes that were."""
    whole, size = whole_bytes(path), path.stat().st_size
    if whole < size:
        os.truncate(path, whole)
    return size - whole


class SegmentWriter:
    """Writes one new segment. What ``write`` was given is with the OS when it returns: kill -9 cannot lose it."""

    def __init__(self, path: Path, first: Iterable[bytes] = ()) -> None:
        """Create the segment with the ``first`` payloads in it; it appears whole or not at all."""
        draft = path.with_suffix(".tmp")
        self.path = path
        self.size = 0
        self._fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.inode = os.fstat(self._fd).st_ino
        self.write(first)
        os.fsync(self._fd)
        os.replace(draft, path)
        _sync_directory(path.parent)

    def write(self, payloads: Iterable[bytes]) -> None:
        """Append in one write. OSError (disk full, say) leaves at most a torn tail: end the run then."""
        data = memoryview(b"".join(map(frame, payloads)))
        while data:
            written = os.write(self._fd, data)
            self.size += written
            data = data[written:]

    def close(self) -> None:
        """Close the segment and sync it to the device, so that it survives a power cut. Repeated calls do nothing."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def damage(directory: Path, written: Mapping[Path, tuple[int, int]]) -> str:
    """Return what has become of the segments in ``written`` (inode and size) or which are missing in between; "" when
    they are all as they were written. Contents are not read."""
    try:
        segment_numbers(directory)
        for path, (inode, size) in written.items():
            status = path.stat()
            if status.st_ino != inode:
                return f"{path} was replaced"
            if status.st_size != size:
                return f"{path} has {status.st_size} bytes, {size} were written"
    except FileNotFoundError as error:
        return f"{error.filename} was deleted"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def remove_drafts(directory: Path) -> None:
    """Remove segments that a crash kept from appearing."""
    for path in directory.glob("*.tmp"):
        path.unlink()


def _read_record(path: Path, data: bytes, offset: int) -> Record | None:
    """The record at ``offset``; None when the file ends within it."""
    start = offset + _HEAD.size
    if start > len(data) or not any(
        memoryview(data)[offset:]
    ):  # a view: the rest is not copied for each record
        return None
    a, b, length_check, c, check, d, length = _HEAD.unpack_from(data, offset)
    if (a, b, c, d) != (_ARRAY, _UINT32, _UINT64, _BIN32):
        raise DamagedError(f"{path}: no record begins at offset {offset}")
    if xxhash.xxh32_intdigest(length.to_bytes(4, "big")) != length_check:
        raise DamagedError(f"{path}: the record at offset {offset} has a damaged length")
    if start + length > len(data):
        return None
    payload = data[start : start + length]
    if xxhash.xxh3_64_intdigest(payload) != check:
        raise DamagedError(f"{path}: the record at offset {offset} does not match its checksum")
    return Record(offset, start + length, payload)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
