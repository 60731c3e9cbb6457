"""What a trace is made of: GPUs that arrive and GPUs that are reclaimed, each at a time or at a step."""

from typing import Literal

import msgspec

Action = Literal["arrive", "reclaim"]


class TraceEvent(msgspec.Struct, frozen=True):
    """One arrival or reclaim. Exactly one of ``at_s`` and ``at_step`` is set, and exactly one of ``gpus``, ``count``.

    A count leaves the choice of GPUs to the coordinator.
    """

    action: Action
    at_s: float | None = None  # seconds from the trace's beginning
    at_step: int | None = None  # once the trainer's step is at least this
    gpus: tuple[str, ...] = ()
    count: int = 0
    grace_s: float = 30.0  # of a reclaim: seconds until the GPUs must be free

    def __post_init__(self) -> None:
        assert (self.at_s is None) != (self.at_step is None), self
        assert bool(self.gpus) != (self.count > 0), self

    @property
    def num_gpus(self) -> int:
        return len(self.gpus) or self.count
