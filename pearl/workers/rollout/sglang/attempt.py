"""One attempt as the engine sees it: what SGLang said of it, checked, turned into deltas. Pure.

SGLang may answer with all tokens so far or with the new ones, and with fewer log-probs than tokens after an abort;
nothing is told on before counts agree. Versions are kept here: tokens that were here before an update began are of
the version before it whatever SGLang calls them, and its labels only say where within the rest the change was.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pearl.types.trajectory import FinishReason, VersionRun
from pearl.types.weights import Version
from pearl.workers.rollout.protocol import Emit, GenerateRequest


class MalformedError(Exception):
    """What SGLang said does not add up; the attempt cannot be trusted any more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one request of SGLang."""

    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]  # (label, first, end) over all of the request's tokens
    prefilled_tokens: int
    finish: str | None  # as SGLang calls it
    message: str = ""


@dataclass(slots=True)
class Attempt:
    """State of one generate request across its successive requests (rids) in SGLang."""

    request: GenerateRequest
    emit: Emit
    stage: Literal["prefill", "decode"] | None = None
    generated: list[int] = field(default_factory=list)
    """Passed on already."""
    rid: str = ""
    """Of its request in SGLang; "" = it has none now."""
    num_known: int = 0
    """Tokens of that request that are here."""
    version: Version | None = None
    """That it runs under."""
    kv_version: Version | None = None
    """The oldest one its KV may be of: that under which it was handed to SGLang."""
    versions: dict[str, Version] = field(default_factory=dict)
    """By label, those that it has run under since."""
    was_prefilled: bool = False
    """Its request's prefill has been told."""
    was_sent: bool = False
    """SGLang may know its request."""
    is_aborted: bool = False
    is_held: bool = False
    """It was taken out of SGLang to go on later."""
    close: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        return self.request.attempt

    @property
    def context(self) -> npt.NDArray[np.int32]:
        """Return the request's ids with what it has generated."""
        if not self.generated:
            return self.request.ids
        return np.concatenate([self.request.ids, np.array(self.generated, np.int32)])

    @property
    def num_left(self) -> int:
        return self.request.params.max_new_tokens - len(self.generated)

    @property
    def num_tokens(self) -> int:
        return len(self.request.ids) + len(self.generated)

    def begin(self, rid: str, version: Version) -> None:
        self.rid, self.num_known = rid, 0
        self.was_prefilled = self.was_sent = self.is_held = False
        self.version = self.kv_version = version
        self.versions = {str(version): version}

    def update(self, version: Version) -> None:
        """Note the version under which it may make tokens from here on."""
        if self.rid:
            self.version = version
            self.versions[str(version)] = version

    def take(self, piece: Piece) -> list[VersionRun]:
        """Append the chunk's tokens to ``generated`` and return their version runs."""
        assert self.version is not None
        assert self.kv_version is not None
        runs = [
            VersionRun(version, count, min(self.kv_version, version))
            for version, count in _labelled(piece, self.num_known, self.versions, self.version)
        ]
        self.num_known += len(piece.ids)
        self.generated += piece.ids
        return runs

    def finish(self, piece: Piece) -> FinishReason | None:
        """Map SGLang's finish reason; an error of a prefill or decode stage becomes "abort", since the peer or the
        link may be at fault."""
        found = finish_of(piece, self.is_aborted or self.is_held)
        return "abort" if found == "error" and self.stage is not None else found

    def read(self, event: Any) -> Piece:
        """Raises MalformedError."""
        return read_event(event, self.num_known, 0 if self.was_prefilled else 1)


def read_event(event: Any, num_known: int, asks_prefill: int = 1) -> Piece:
    """Read what an event adds to a request of which ``num_known`` tokens are here. Raises MalformedError."""
    meta = event.get("meta_info") if isinstance(event, dict) else None
    if not isinstance(meta, dict):
        raise MalformedError(f"an event without meta_info: {str(event)[:200]}")
    total = int(meta.get("completion_tokens", 0))
    ids = [int(token) for token in _new(event.get("output_ids") or [], num_known, total, "ids")]
    pairs = _new(meta.get("output_token_logprobs") or [], num_known, total, "log-probs")
    logprobs = [float(entry[0]) if entry[0] is not None else math.nan for entry in pairs]
    if [int(entry[1]) for entry in pairs] != ids:
        raise MalformedError(f"log-probs of other tokens than those generated: {pairs[:3]} for {ids[:3]}")
    if not all(-math.inf < value <= 1e-3 for value in logprobs):
        raise MalformedError(f"log-probs that are none: {[v for v in logprobs if not v <= 1e-3][:3]}")
    spans = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in meta.get("weight_versions") or []]
    prefilled = int(meta.get("prompt_tokens", 0)) - int(meta.get("cached_tokens") or 0)
    finish = meta.get("finish_reason")
    kind, message = (
        (finish.get("type"), str(finish.get("message", ""))) if isinstance(finish, dict) else (None, "")
    )
    return Piece(ids, logprobs, spans, max(0, prefilled) if asks_prefill and total else 0, kind, message)


def finish_of(piece: Piece, is_aborted: bool) -> FinishReason | None:
    match piece.finish:
        case None:
            return None
        case "stop" | "length":
            return piece.finish
        case "abort":
            return "abort" if is_aborted or piece.message in ("", "Aborted") else "error"
    return "error"


def _new(values: Sequence[Any], num_known: int, total: int, what: str) -> Sequence[Any]:
    if len(values) == total - num_known:
        return values
    if len(values) == total:
        return values[num_known:]
    raise MalformedError(f"{len(values)} {what} after {num_known} of {total} tokens")


def _labelled(
    piece: Piece, start: int, versions: dict[str, Version], current: Version
) -> list[tuple[Version, int]]:
    """(version, count) over the piece's tokens in order. What the labels do not cover is of the current version."""
    end = start + len(piece.ids)
    found: list[tuple[Version, int]] = []
    position = start
    for label, first, last in piece.spans:
        count = min(last, end) - max(first, position)
        version = versions.get(label)
        if count <= 0:
            continue
        if version is None or first > position:
            raise MalformedError(f"tokens of version {label!r}, which this attempt never ran under")
        found.append((version, count))
        position += count
    if position < end:
        found.append((current, end - position))
    return found
