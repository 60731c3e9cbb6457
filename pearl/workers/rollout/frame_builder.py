"""Gathers what attempts produce into frames: one ``Deltas`` message for all of a worker's attempts."""

from dataclasses import dataclass, field

import numpy as np

from pearl.types.messages.rollout import AttemptDelta, Deltas, IterationStat
from pearl.types.trajectory import FinishReason, VersionRun
from pearl.types.version_runs import append_run
from pearl.workers.rollout.protocol import Delta


@dataclass(slots=True)
class Gathered:
    """What one attempt produced since its last frame."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)
    prefilled_tokens: int = 0
    finish: FinishReason | None = None
    error: str = ""

    def add(self, delta: Delta) -> None:
        self.ids += delta.ids
        self.logprobs += delta.logprobs
        for run in delta.runs:
            append_run(self.runs, run)
        self.prefilled_tokens += delta.prefilled_tokens
        self.finish = delta.finish
        self.error = delta.error

    def packed(self, attempt: int) -> AttemptDelta:
        return AttemptDelta(
            attempt,
            np.array(self.ids, "<i4").tobytes(),
            np.array(self.logprobs, "<f4").tobytes(),
            tuple(self.runs),
            self.prefilled_tokens,
            self.finish,
            self.error,
        )


class FrameBuilder:
    """Bounded by what its attempts may still generate, however long frames are not taken."""

    def __init__(self) -> None:
        self._gathered: dict[int, Gathered] = {}
        self._sequence = 0
        self.has_finished = False
        """An attempt ended: somebody waits for that."""

    def add(self, delta: Delta) -> None:
        gathered = self._gathered.get(delta.attempt)
        if gathered is None:
            gathered = self._gathered[delta.attempt] = Gathered()
        gathered.add(delta)
        self.has_finished |= delta.is_last

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def take(self, iterations: list[IterationStat]) -> Deltas:
        """The next frame of the sequence, with everything added so far."""
        deltas = tuple(gathered.packed(attempt) for attempt, gathered in self._gathered.items())
        frame = Deltas(self._sequence, deltas, tuple(iterations))
        self._gathered.clear()
        self.has_finished = False
        self._sequence += 1
        return frame
