"""The run's journal: a directory (``D/journal.msgpack/``) of segments. Each opens with a snapshot of the core and
holds the entries (now, event, commands) that came after it, so any segment can be replayed on its own and a
resume reads only the newest.

The journal neither knows nor checks what events, commands, snapshots and settings are: the caller encodes them, the
first two as MessagePack. ``append`` returns when the entries are with the OS, and only then may their commands run.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from pearl.runtime import wal

FORMAT = 2
"""Raised whenever a snapshot, an event or a command written before could not be read any more."""
SEGMENT_BYTES = 64 << 20  # a segment is read whole into memory when replayed


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """First record of a segment: the core's state before entry number ``first_entry`` (from 0)."""

    format: int
    first_entry: int
    snapshot: bytes
    settings: bytes = b""  # of the run; empty in journals that were written before there was this field


class Entry(msgspec.Struct, frozen=True, array_like=True):
    now: float
    event: msgspec.Raw
    commands: msgspec.Raw


class Segment(msgspec.Struct, frozen=True):
    """A snapshot and what happened after it."""

    opening: Opening
    entries: list[Entry]
    torn_bytes: int  # of a last record that a crash cut short; its commands never ran


_encode = msgspec.msgpack.Encoder().encode
_decode_opening = msgspec.msgpack.Decoder(Opening).decode
_decode_entry = msgspec.msgpack.Decoder(Entry).decode


class Journal:
    """The one writer of a journal; made by ``create`` or ``open_for_append``."""

    def __init__(
        self,
        directory: Path,
        number: int,
        first_entry: int,
        snapshot: bytes,
        segment_bytes: int,
        settings: bytes,
    ) -> None:
        self.directory = directory
        self.num_entries = first_entry  # since the run began
        self._segment_bytes = segment_bytes
        self._settings = settings
        self._closed: dict[Path, tuple[int, int]] = {}  # inode and size of the segments that this life wrote
        self._number = number
        self._writer = self._open_segment(snapshot)

    @classmethod
    def create(
        cls, directory: Path, snapshot: bytes, *, segment_bytes: int = SEGMENT_BYTES, settings: bytes = b""
    ) -> Self:
        """Begin a journal. ValueError when there is one already."""
        directory.mkdir(parents=True, exist_ok=True)
        wal.remove_drafts(directory)
        if wal.segment_numbers(directory):
            raise ValueError(
                f"{directory} already holds a journal: resume that run or choose another run directory"
            )
        return cls(directory, 1, 0, snapshot, segment_bytes, settings)

    @classmethod
    def open_for_append(
        cls, directory: Path, snapshot: bytes, *, segment_bytes: int = SEGMENT_BYTES, settings: bytes = b""
    ) -> Self:
        """Go on after ``recover``: cut off a torn tail and open a new segment with ``snapshot``, the state to which
        the recovered entries led."""
        wal.remove_drafts(directory)
        newest = recover(directory)
        number = wal.segment_numbers(directory)[-1]
        wal.cut_torn_tail(wal.segment_path(directory, number))
        first_entry = newest.opening.first_entry + len(newest.entries)
        return cls(directory, number + 1, first_entry, snapshot, segment_bytes, settings)

    @property
    def wants_snapshot(self) -> bool:
        """The segment is full: call ``roll`` when convenient."""
        return self._writer.size >= self._segment_bytes

    def append(self, entries: Iterable[tuple[float, bytes, bytes]]) -> None:
        """Write (now, event, commands) each; with the OS on return. After an OSError the run must end."""
        records = [
            _encode(Entry(now, msgspec.Raw(event), msgspec.Raw(commands))) for now, event, commands in entries
        ]
        self._writer.write(records)
        self.num_entries += len(records)

    def roll(self, snapshot: bytes) -> None:
        """Close the segment and open the next with ``snapshot``, the state after the last entry."""
        self._closed[self._writer.path] = self._writer.inode, self._writer.size
        self._writer.close()
        self._number += 1
        self._writer = self._open_segment(snapshot)

    def damage(self) -> str:
        """Return what is missing on disk of this life's segments and of those before them; "" = nothing."""
        written = self._closed | {self._writer.path: (self._writer.inode, self._writer.size)}
        return wal.damage(self.directory, written)

    def close(self) -> None:
        self._writer.close()

    def _open_segment(self, snapshot: bytes) -> wal.SegmentWriter:
        opening = Opening(FORMAT, self.num_entries, snapshot, self._settings)
        return wal.SegmentWriter(wal.segment_path(self.directory, self._number), [_encode(opening)])


def recover(directory: Path) -> Segment:
    """The newest segment. ValueError when there is no journal, DamagedError when it is damaged."""
    return _load(wal.segment_path(directory, _numbers(directory)[-1]), may_be_torn=True)


def read(directory: Path) -> Iterator[Segment]:
    """All segments in order, one in memory at a time. Raises as ``recover``."""
    numbers = _numbers(directory)
    for number in numbers:
        yield _load(wal.segment_path(directory, number), may_be_torn=number == numbers[-1])


def _numbers(directory: Path) -> list[int]:
    numbers = wal.segment_numbers(directory) if directory.is_dir() else []
    if not numbers:
        raise ValueError(f"{directory} holds no journal: is it the journal.msgpack of a run directory?")
    return numbers


def _other_format(path: Path, found: int) -> str:
    return (
        f"{path}: the journal has format {found}, and this version of PEARL reads format {FORMAT} only: the run can "
        f"be resumed and replayed by the version that made it; pearl report opens its results with this one too"
    )


def _load(path: Path, *, may_be_torn: bool) -> Segment:
    size = path.stat().st_size
    records = list(wal.read_segment(path, may_be_torn=may_be_torn))
    if not records:
        raise wal.DamagedError(f"{path}: the snapshot at offset 0 is cut short")
    try:
        opening = _decode_opening(records[0].payload)
        if opening.format != FORMAT:
            raise ValueError(_other_format(path, opening.format))
        entries = [_decode_entry(record.payload) for record in records[1:]]
    except msgspec.DecodeError as error:
        raise wal.DamagedError(f"{path}: not a segment of a journal: {error}") from error
    return Segment(opening, entries, size - records[-1].end)
