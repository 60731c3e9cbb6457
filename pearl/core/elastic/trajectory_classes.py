"""A batch as a few classes of trajectories that live about equally long.

As many as one batch can tell: with finer ones among the slowest, predictions are nearer to the batch that was measured
and choices worse for the next, whose slowest trajectories are others.
"""

from collections.abc import Sequence
from typing import Protocol

from pearl.types.profile import TrajectoryClass
from pearl.types.trajectory import Turn

SHARES = (0.2, 0.2, 0.2, 0.2)
"""Of a batch, from the slowest on; the rest is one class more. Each has at least one trajectory."""


class Sample(Protocol):
    @property
    def turns(self) -> Sequence[Turn]: ...
    @property
    def env_seconds(self) -> float: ...
    @property
    def live_seconds(self) -> float: ...


def classify(samples: Sequence[Sample]) -> tuple[TrajectoryClass, ...]:
    """The quickest class first; every sample has a turn. Batches of one size have one number of classes."""
    ordered = sorted(samples, key=lambda sample: sample.live_seconds)
    found: list[TrajectoryClass] = []
    end = len(ordered)
    for share in (*SHARES, 1.0):
        begin = max(0, end - max(1, round(share * len(ordered))))
        if begin < end:
            found.append(_class_of(ordered[begin:end], len(ordered)))
        end = begin
    return tuple(reversed(found))


def _class_of(samples: Sequence[Sample], total: int) -> TrajectoryClass:
    turns = [turn for sample in samples for turn in sample.turns]
    return TrajectoryClass(
        share=len(samples) / total,
        turns=len(turns) / len(samples),
        input_tokens=sum(turn.prefilled_tokens for turn in turns) / len(turns),
        input_tokens2=sum(turn.prefilled_tokens**2 for turn in turns) / len(turns),
        output_tokens=sum(turn.generated_tokens for turn in turns) / len(turns),
        env_seconds=sum(sample.env_seconds for sample in samples) / len(turns),
        context_tokens=sum(turn.new_prompt_tokens + turn.retained_tokens for turn in turns) / len(samples),
    )


def averaged(
    before: tuple[TrajectoryClass, ...], newest: tuple[TrajectoryClass, ...], weight: float
) -> tuple[TrajectoryClass, ...]:
    """Class by class; the newest alone where a batch of another size came before."""
    if len(before) != len(newest):
        return newest
    names = TrajectoryClass.__struct_fields__
    return tuple(
        TrajectoryClass(
            **{name: (1 - weight) * getattr(old, name) + weight * getattr(new, name) for name in names}
        )
        for old, new in zip(before, newest, strict=True)
    )
