"""One trajectory's tokens, packed: ids as little-endian int32, log-probs as float32, mask and flags as uint8."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from pearl.types.trajectory import VersionRun
from pearl.types.version_runs import append_run, first_runs
from pearl.types.weights import Version

TokenKind = Literal["prompt", "generated", "observation"]
ID_BYTES = 4
LOGPROB_BYTES = 4


class Span(msgspec.Struct, frozen=True, array_like=True):
    """``count`` consecutive tokens of one kind and turn, as they lie in the trajectory."""

    kind: TokenKind
    turn: int
    count: int


class TrajectoryTokens(msgspec.Struct, frozen=True):
    """A trajectory at one moment. Position i of ids, mask and log-probs belongs to token i; prompt and observation
    positions have mask 0 and log-prob 0."""

    num_tokens: int
    ids: bytes
    mask: bytes
    logprobs: bytes
    spans: tuple[Span, ...]  # counts sum to num_tokens
    runs: tuple[VersionRun, ...]  # of the generated tokens in order; counts sum to their number
    prompt: bytes
    actions: tuple[bytes, ...]  # generated ids a turn; the last may still grow
    observations: tuple[bytes, ...]  # ids a turn, of the turns the environment has answered

    def current(self, version: Version) -> bytes:
        """A flag a token: 1 where the token and all keys and values it attended to were made under ``version``."""
        made = b"".join(_flag(run.version == run.kv_version == version) * run.count for run in self.runs)
        flags, start = [], 0
        for span in self.spans:
            if span.kind == "generated":
                flags.append(made[start : start + span.count])
                start += span.count
            else:
                flags.append(bytes(span.count))
        return b"".join(flags)


class GrowingTokens:
    """The writable side of ``TrajectoryTokens``."""

    __slots__ = ("_ids", "_logprobs", "_runs", "_spans")

    def __init__(self) -> None:
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._spans: list[Span] = []
        self._runs: list[VersionRun] = []

    def __len__(self) -> int:
        return len(self._ids) // ID_BYTES

    def append(
        self, kind: TokenKind, turn: int, ids: bytes, logprobs: bytes, runs: Iterable[VersionRun]
    ) -> None:
        count = len(ids) // ID_BYTES
        self._ids += ids
        self._logprobs += logprobs or bytes(count * LOGPROB_BYTES)
        last = self._spans[-1] if self._spans else None
        if last is not None and last.kind == kind and last.turn == turn:
            self._spans[-1] = Span(kind, turn, last.count + count)
        else:
            self._spans.append(Span(kind, turn, count))
        for run in runs:
            append_run(self._runs, run)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens; an answer of no tokens stays when all before it does."""
        num_generated, self._spans = _cut_spans(self._spans, length)
        self._runs = first_runs(self._runs, num_generated)
        del self._ids[length * ID_BYTES :]
        del self._logprobs[length * LOGPROB_BYTES :]

    def context(self, length: int | None) -> bytes:
        return bytes(self._ids if length is None else self._ids[: length * ID_BYTES])

    def view(self) -> TrajectoryTokens:
        ids = bytes(self._ids)
        return TrajectoryTokens(
            num_tokens=len(self),
            ids=ids,
            mask=b"".join(_flag(span.kind == "generated") * span.count for span in self._spans),
            logprobs=bytes(self._logprobs),
            spans=tuple(self._spans),
            runs=tuple(self._runs),
            prompt=b"".join(_by_turn(self._spans, ids, "prompt")),
            actions=_by_turn(self._spans, ids, "generated"),
            observations=_by_turn(self._spans, ids, "observation"),
        )


def _flag(is_set: bool) -> bytes:
    return b"\1" if is_set else b"\0"


def _by_turn(spans: list[Span], ids: bytes, kind: TokenKind) -> tuple[bytes, ...]:
    """The ids of one kind, joined turn by turn from turn 0; a turn without any has none."""
    turns: list[bytes] = []
    start = 0
    for span in spans:
        end = start + span.count * ID_BYTES
        if span.kind == kind:
            turns.extend([b""] * (span.turn + 1 - len(turns)))
            turns[span.turn] += ids[start:end]
        start = end
    return tuple(turns)


def _cut_spans(spans: list[Span], length: int) -> tuple[int, list[Span]]:
    """The spans of the first ``length`` tokens, and how many of those tokens are generated."""
    kept: list[Span] = []
    num_generated = start = 0
    for span in spans:
        count = min(span.count, length - start)
        if count < 0 or (count == 0 and span.count > 0):
            break
        kept.append(Span(span.kind, span.turn, count))
        num_generated += count if span.kind == "generated" else 0
        start += span.count
    return num_generated, kept
