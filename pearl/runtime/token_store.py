"""The only place of token ids and log-probs: append-only on disk, whole in memory while a trajectory lives.

Operations are buffered until ``flush``; one flush is one record of a segment, so it is on disk whole or not at
all. A segment is deleted once it and all before it hold nothing of a live trajectory: deletion in order keeps
every ``forget`` on disk for at least as long as the tokens that it forgets.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from pearl.runtime import wal
from pearl.runtime.trajectory_tokens import (
    ID_BYTES,
    LOGPROB_BYTES,
    GrowingTokens,
    TokenKind,
    TrajectoryTokens,
)
from pearl.types.trajectory import VersionRun

SEGMENT_BYTES = 16 << 20  # some minutes of a busy run: small enough to be deleted soon
BUFFER_BYTES = 4 << 20  # flushed by itself beyond this


class _Append(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    trajectory: int
    kind: TokenKind
    turn: int
    ids: bytes
    logprobs: bytes
    runs: tuple[VersionRun, ...]


class _Cut(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    trajectory: int
    length: int


class _Restart(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    trajectory: int


class _Forget(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    trajectory: int


_Operation = _Append | _Cut | _Restart | _Forget
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Operation]).decode


class TokenStore:
    """One writer a directory. ``torn_bytes`` tells how much of a last, cut-short record was dropped on opening."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open or create; what was flushed before is there again. DamagedError when a segment is damaged."""
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._tokens: dict[int, GrowingTokens] = {}
        self._buffer: list[_Operation] = []
        self._buffered_bytes = 0
        self._live: dict[int, set[int]] = {}  # segment -> live trajectories with tokens in it, oldest first
        self._writer: wal.SegmentWriter | None = None
        self._written: dict[Path, tuple[int, int]] = {}  # inode and size of the closed segments
        self._number = 0
        self.torn_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        wal.remove_drafts(directory)
        self._load()

    def append(
        self,
        trajectory: int,
        kind: TokenKind,
        turn: int,
        ids: bytes,
        logprobs: bytes = b"",
        runs: tuple[VersionRun, ...] = (),
    ) -> None:
        """Add tokens at the trajectory's end. Generated ones need a log-prob each and runs that add up to them.

        Raises:
            ValueError: counts disagree; nothing was added, and whoever sent them is broken.
        """
        _check(trajectory, kind, ids, logprobs, runs)
        self._do(_Append(trajectory, kind, turn, ids, logprobs, runs))
        self._buffered_bytes += len(ids) + len(logprobs)
        if self._buffered_bytes > BUFFER_BYTES:
            self.flush()

    def restart(self, trajectory: int) -> None:
        """All its tokens so far are void."""
        self._do(_Restart(trajectory))

    def truncate(self, trajectory: int, length: int) -> None:
        """Keep its first ``length`` tokens. ValueError when there are fewer."""
        if not 0 <= length <= self.length(trajectory):
            raise ValueError(
                f"trajectory {trajectory} has {self.length(trajectory)} tokens, not {length} to keep"
            )
        self._do(_Cut(trajectory, length))

    def forget(self, trajectory: int) -> None:
        """Drop a trajectory that nobody will ask for again; unknown ones are ignored."""
        if trajectory in self._tokens:
            self._do(_Forget(trajectory))

    def flush(self) -> None:
        """Everything so far is with the OS on return: kill -9 cannot lose it. After an OSError the run must end."""
        if not self._buffer:
            return
        writer = self._segment()
        writer.write([_encode(self._buffer)])
        self._note(self._number, self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        self._delete_dead()

    def trajectories(self) -> list[int]:
        """Return the trajectories that have tokens and are not forgotten."""
        return list(self._tokens)

    def length(self, trajectory: int) -> int:
        tokens = self._tokens.get(trajectory)
        return 0 if tokens is None else len(tokens)

    def context(self, trajectory: int, length: int | None = None) -> bytes:
        """Packed ids of the whole trajectory, or of its first ``length`` tokens, which must be there."""
        tokens = self._tokens[trajectory]
        assert length is None or 0 <= length <= len(tokens), (trajectory, length, len(tokens))
        return tokens.context(length)

    def view(self, trajectory: int) -> TrajectoryTokens:
        return self._tokens[trajectory].view()

    def damage(self) -> str:
        """Return what is missing on disk of that which a resume would need; "" = nothing."""
        self.flush()
        written = dict(self._written)
        if self._writer is not None:
            written[self._writer.path] = self._writer.inode, self._writer.size
        return wal.damage(self._directory, written)

    def close(self) -> None:
        """Flush, and put the last segment on the device. Harmless twice."""
        self.flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _load(self) -> None:
        numbers = wal.segment_numbers(self._directory)
        for number in numbers:
            path = wal.segment_path(self._directory, number)
            if number == numbers[-1]:
                self.torn_bytes = wal.cut_torn_tail(path)
            self._live[number] = set()
            self._number = number
            status = path.stat()
            self._written[path] = status.st_ino, status.st_size
            for record in wal.read_segment(path, may_be_torn=False):
                self._replay(path, record)

    def _replay(self, path: Path, record: wal.Record) -> None:
        try:
            operations = _decode(record.payload)
        except msgspec.DecodeError as error:
            raise wal.DamagedError(f"{path}: no token record at offset {record.offset}: {error}") from error
        for operation in operations:
            _apply_to(self._tokens, operation)
        self._note(self._number, operations)

    def _do(self, operation: _Operation) -> None:
        _apply_to(self._tokens, operation)
        self._buffer.append(operation)

    def _note(self, number: int, operations: Iterable[_Operation]) -> None:
        """Keep account of which segments live trajectories need."""
        live = self._live[number]
        for operation in operations:
            if isinstance(operation, _Append):
                live.add(operation.trajectory)
            elif isinstance(operation, _Restart | _Forget):
                for trajectories in self._live.values():
                    trajectories.discard(operation.trajectory)

    def _segment(self) -> wal.SegmentWriter:
        """The segment to write to; a new one when there is none yet or it is full."""
        if self._writer is None or self._writer.size >= self._segment_bytes:
            if self._writer is not None:
                self._written[self._writer.path] = self._writer.inode, self._writer.size
                self._writer.close()
            self._number += 1
            self._live[self._number] = set()
            self._writer = wal.SegmentWriter(wal.segment_path(self._directory, self._number))
        return self._writer

    def _delete_dead(self) -> None:
        while (oldest := next(iter(self._live))) != self._number and not self._live[oldest]:
            path = wal.segment_path(self._directory, oldest)
            path.unlink(missing_ok=True)
            self._written.pop(path, None)
            del self._live[oldest]


def read_tokens(directory: Path, only: Collection[int] | None = None) -> dict[int, TrajectoryTokens]:
    """Read the tokens of every trajectory that the files still hold, or of ``only`` these, finished ones included.
    Changes nothing on disk.

    Finished trajectories go with their segment of 16 MB, the oldest first: of a long run only the newest are left.

    Raises:
        DamagedError: a segment does not hold what was written.
    """
    found: dict[int, GrowingTokens] = {}
    numbers = wal.segment_numbers(directory)
    for number in numbers:
        path = wal.segment_path(directory, number)
        for record in wal.read_segment(path, may_be_torn=number == numbers[-1]):
            for operation in _decode(record.payload):
                if isinstance(operation, _Forget) or (only is not None and operation.trajectory not in only):
                    continue
                _apply_to(found, operation)
    return {trajectory: tokens.view() for trajectory, tokens in found.items()}


def _apply_to(found: dict[int, GrowingTokens], operation: _Operation) -> None:
    match operation:
        case _Append(trajectory, kind, turn, ids, logprobs, runs):
            found.setdefault(trajectory, GrowingTokens()).append(kind, turn, ids, logprobs, runs)
        case _Cut(trajectory, length):
            # Unknown when the tokens went with a deleted segment: a forget follows then.
            if trajectory in found:
                found[trajectory].cut(length)
        case _Restart(trajectory) | _Forget(trajectory):
            found.pop(trajectory, None)


def _check(
    trajectory: int, kind: TokenKind, ids: bytes, logprobs: bytes, runs: tuple[VersionRun, ...]
) -> None:
    count, rest = divmod(len(ids), ID_BYTES)
    if rest:
        raise ValueError(f"trajectory {trajectory}: {len(ids)} bytes are no int32 ids")
    expected = count if kind == "generated" else 0
    if len(logprobs) != expected * LOGPROB_BYTES:
        raise ValueError(
            f"trajectory {trajectory}: {len(logprobs)} bytes of log-probs for {expected} generated tokens"
        )
    if sum(run.count for run in runs) != expected:
        raise ValueError(f"trajectory {trajectory}: version runs {runs} for {expected} generated tokens")
