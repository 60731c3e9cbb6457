"""What the core knows of generated text: spans and counts, never token ids (those are in the token store)."""

from enum import StrEnum
from typing import Literal

import msgspec

from pearl.types.ids import AttemptId, PromptId, Slot, TrajectoryId
from pearl.types.weights import Version

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why an attempt ended: an end token, its token limit, an abort, or a failure of that request alone."""


class Outcome(StrEnum):
    """How a trajectory ended."""

    DONE = "done"  # the environment said so
    TRUNCATED_TURNS = "truncated_turns"  # used all its turns
    TRUNCATED_CONTEXT = "truncated_context"  # the next turn would not fit
    EXPIRED = "expired"  # ran past its deadline: masked
    INFRASTRUCTURE = "infrastructure"  # environment or service failed: masked

    @property
    def is_masked(self) -> bool:
        """Masked samples take no part in the loss nor in the group's baseline."""
        return self in (Outcome.EXPIRED, Outcome.INFRASTRUCTURE)


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``count`` consecutive generated tokens made under one version."""

    version: Version
    count: int
    kv_version: Version  # the oldest version whose keys and values these tokens attended to


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one attempt produced since its last delta. Ids and log-probs are in the token store."""

    attempt: AttemptId
    count: int
    runs: tuple[VersionRun, ...]
    prefilled_tokens: int  # prompt tokens computed (not reused) for this attempt since the last delta
    finish: FinishReason | None = None
    error: str = ""


class Turn(msgspec.Struct, gc=False):
    """One exchange with the environment, as it goes into ``trajectories.jsonl``."""

    new_prompt_tokens: int
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    retained_tokens: int = 0  # generated tokens that stay in the next turn's context
    env_seconds: float = 0.0
    worker: Slot | None = None  # the slot that finished the turn
    versions: list[VersionRun] = msgspec.field(default_factory=list)

    @property
    def reprefilled_tokens(self) -> int:
        """Prefilled beyond the first time: caches lost, what a decode worker made."""
        return max(0, self.prefilled_tokens - self.new_prompt_tokens)


class TrajectoryRecord(msgspec.Struct, frozen=True, gc=False):
    """One line of ``trajectories.jsonl``, written when the trajectory is trained, masked or discarded."""

    prompt: PromptId
    group: int
    trajectory: TrajectoryId
    cohort: int
    lineage: int
    trained_step: int | None  # None: generated but not trained in this lineage (see `outcome`, `discarded`)
    start_version: Version | None
    end_version: Version | None
    reward: float
    outcome: str
    turns: list[Turn]
    discarded: str = ""  # why its tokens were thrown away: "" when they were not
    evaluation: int | None = None  # evaluation round; None for a training trajectory
    reset_seconds: float = 0.0  # of the first turn's env_seconds, before its prompt was there
