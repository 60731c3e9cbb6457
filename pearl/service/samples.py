"""``samples.jsonl``: some trajectories of each step and evaluation round as text, for people.

A trajectory's tokens are gone from disk a while after it has ended; a sample stays. Samples are no part of a run's
state: a resume does not write them again, and whatever goes wrong with them is said once and hurts nothing else.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pearl.runtime.errors import PeerGoneError, QueueFullError, RemoteError
from pearl.runtime.token_store import TokenStore
from pearl.runtime.trajectory_tokens import ID_BYTES, TrajectoryTokens
from pearl.service.run_files import strict_json
from pearl.types.trajectory import TrajectoryRecord

log = logging.getLogger(__name__)

NAME, OLDER_NAME = "samples.jsonl", "samples.older.jsonl"
MAX_FILE_BYTES = 16 << 20
"""A full file becomes the older one, in place of that before it."""
MAX_PARTS = 64
"""Of one trajectory; the first and last ones are kept."""
MAX_IDS = 64
"""Of a part that has no text."""
MAX_PART_TOKENS = 16_384
MAX_PENDING = 64
MAX_STEPS_COUNTED = 64
DECODE_LIMIT_S = 20.0
DRAIN_LIMIT_S = 5.0

Decode = Callable[[tuple[bytes, ...]], Awaitable[tuple[str, ...] | None]]
Spawn = Callable[[str, Coroutine[Any, Any, None]], object]


class Part(msgspec.Struct, omit_defaults=True):
    """Consecutive tokens of one kind and turn."""

    kind: str
    turn: int
    tokens: int
    text: str | None = None
    ids: list[int] | None = None  # the first ones, where there is no text


class Sample(msgspec.Struct):
    trajectory: int
    prompt: int
    group: int
    step: int
    evaluation: int | None
    trained_step: int | None
    reward: float
    outcome: str
    discarded: str
    num_tokens: int
    parts_left_out: int
    parts: list[Part]


class SampleWriter:
    def __init__(
        self, run_dir: Path, num_samples: int, store: TokenStore, decode: Decode, spawn: Spawn
    ) -> None:
        """``num_samples`` of each step and of each evaluation round; 0 = none."""
        self._path = run_dir / NAME
        self._older = run_dir / OLDER_NAME
        self._num_samples = num_samples
        self._store = store
        self._decode = decode
        self._spawn = spawn
        self._counts: dict[tuple[str, int], int] = {}
        self._num_pending = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._can_decode = True
        self._failure = ""

    def offer(self, record: TrajectoryRecord) -> None:
        """Take the trajectory's tokens, which the store still has, if it is among those to be kept."""
        is_evaluation = record.evaluation is not None
        key = ("evaluation", record.evaluation or 0) if is_evaluation else ("step", record.cohort)
        count = self._counts.get(key, 0)
        if count >= self._num_samples or self._num_pending >= MAX_PENDING or self._failure:
            return
        if not self._store.length(record.trajectory):
            return
        self._counts[key] = count + 1
        while len(self._counts) > MAX_STEPS_COUNTED:
            del self._counts[next(iter(self._counts))]
        sample, ids = _sampled(record, self._store.view(record.trajectory))
        self._num_pending += 1
        self._is_idle.clear()
        self._spawn(f"sample {record.trajectory}", self._keep(sample, ids))

    async def drain(self) -> None:
        """Wait until what was taken is written, within a limit."""
        try:
            async with asyncio.timeout(DRAIN_LIMIT_S):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("%d samples were not written within %g s", self._num_pending, DRAIN_LIMIT_S)

    async def _keep(self, sample: Sample, ids: tuple[bytes, ...]) -> None:
        try:
            texts = await self._texts(ids)
            for index, part in enumerate(sample.parts):
                if texts is not None:
                    part.text = texts[index]
                else:
                    part.ids = np.frombuffer(ids[index][: MAX_IDS * ID_BYTES], "<i4").tolist()
            self._write(strict_json(sample) + b"\n")
        except OSError as error:
            self._fail(f"{self._path}: {error.strerror or error}")
        finally:
            self._num_pending -= 1
            if not self._num_pending:
                self._is_idle.set()

    async def _texts(self, ids: tuple[bytes, ...]) -> tuple[str, ...] | None:
        if not self._can_decode:
            return None
        try:
            async with asyncio.timeout(DECODE_LIMIT_S):
                texts = await self._decode(ids)
        except (PeerGoneError, QueueFullError, RemoteError, TimeoutError) as error:
            log.warning("a sample is kept as ids, since it could not be decoded: %r", error)
            return None
        self._can_decode = texts is not None
        return texts if texts is not None and len(texts) == len(ids) else None

    def _write(self, line: bytes) -> None:
        if self._path.exists() and self._path.stat().st_size + len(line) > MAX_FILE_BYTES:
            self._path.replace(self._older)
        with self._path.open("ab") as file:
            file.write(line)

    def _fail(self, reason: str) -> None:
        if not self._failure:
            log.warning("no more samples are kept: %s", reason)
        self._failure = reason


def _sampled(record: TrajectoryRecord, tokens: TrajectoryTokens) -> tuple[Sample, tuple[bytes, ...]]:
    """The sample without its text, and the ids that the text is of."""
    parts: list[Part] = []
    ids: list[bytes] = []
    start = 0
    for span in tokens.spans:
        end = start + span.count
        parts.append(Part(span.kind, span.turn, span.count))
        ids.append(tokens.ids[start * ID_BYTES : min(end, start + MAX_PART_TOKENS) * ID_BYTES])
        start = end
    num_left_out = max(0, len(parts) - MAX_PARTS)
    if num_left_out:
        half = MAX_PARTS // 2
        parts, ids = parts[:half] + parts[-half:], ids[:half] + ids[-half:]
    sample = Sample(
        trajectory=record.trajectory,
        prompt=record.prompt,
        group=record.group,
        step=record.cohort,
        evaluation=record.evaluation,
        trained_step=record.trained_step,
        reward=record.reward,
        outcome=record.outcome,
        discarded=record.discarded,
        num_tokens=tokens.num_tokens,
        parts_left_out=num_left_out,
        parts=parts,
    )
    return sample, tuple(ids)
