"""Samples as the trainer uses them: unpacked, checked, in trajectory order. A malformed one hurts only itself."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pearl.types.messages.environment import MAX_REWARD
from pearl.types.messages.training import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """``positions`` are those of the generated tokens; the arrays after it have one entry for each of them."""

    trajectory: int
    group: int
    reward: float
    masked: bool  # out of loss and baseline
    invalid: bool  # masked because its own numbers are unusable
    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]  # rollout side
    current: npt.NDArray[np.bool_]

    @property
    def num_trained(self) -> int:
        """Tokens with a loss."""
        return 0 if self.masked else len(self.positions)

    @property
    def is_run(self) -> bool:
        return self.num_trained > 0

    @property
    def num_inputs(self) -> int:
        """Tokens the model has to see: all before the last trained one."""
        return int(self.positions[-1]) if len(self.positions) else 0


def unpack(samples: Iterable[Sample], vocabulary_size: int) -> list[TrainingSample]:
    """All samples, in trajectory order whatever order they came in."""
    return [
        _unpack(sample, vocabulary_size) for sample in sorted(samples, key=lambda sample: sample.trajectory)
    ]


def _unpack(sample: Sample, vocabulary_size: int) -> TrainingSample:
    problem = _malformed(sample)
    if not problem:
        ids = np.frombuffer(sample.ids, "<i4")
        positions = np.flatnonzero(np.frombuffer(sample.mask, np.uint8))
        logprobs = np.frombuffer(sample.logprobs, "<f4")[positions]
        current = np.frombuffer(sample.current, np.uint8)[positions] != 0
        problem = _unusable(sample.reward, ids, positions, logprobs, vocabulary_size)
    if problem:
        if not sample.masked:
            log.warning("trajectory %d is masked: %s", sample.trajectory, problem)
        return _without_tokens(sample)
    return TrainingSample(
        sample.trajectory,
        sample.group,
        sample.reward,
        sample.masked,
        False,
        ids,
        positions,
        logprobs,
        current,
    )


def _malformed(sample: Sample) -> str:
    wanted = {"ids": 4, "mask": 1, "logprobs": 4, "current": 1}
    for name, item_bytes in wanted.items():
        given = len(getattr(sample, name))
        if given != item_bytes * sample.num_tokens:
            return (
                f"{name} has {given} bytes, {sample.num_tokens} tokens need {item_bytes * sample.num_tokens}"
            )
    return ""


def _unusable(
    reward: float,
    ids: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    logprobs: npt.NDArray[np.float32],
    vocabulary_size: int,
) -> str:
    if not abs(reward) <= MAX_REWARD:  # NaN included
        return f"its reward is {reward}, not a number of magnitude up to {MAX_REWARD:g}"
    if not np.isfinite(logprobs).all():
        return f"{np.count_nonzero(~np.isfinite(logprobs))} of its {len(logprobs)} log-probs are not finite"
    if len(positions) and positions[0] == 0:
        return "its first token counts as generated, but nothing comes before it"
    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary_size):
        return f"it has ids from {ids.min()} to {ids.max()}, the model has {vocabulary_size}"
    return ""


def _without_tokens(sample: Sample) -> TrainingSample:
    return TrainingSample(
        trajectory=sample.trajectory,
        group=sample.group,
        reward=0.0,
        masked=True,
        invalid=not sample.masked,
        ids=np.zeros(0, np.int32),
        positions=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        current=np.zeros(0, np.bool_),
    )
