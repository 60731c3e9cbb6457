"""Coordinator and environment workers. Ids are packed little-endian int32; text leaves the
environment worker only in samples for people."""

from typing import Literal

import msgspec

from pearl.types.messages.training import Demonstration

EnvironmentFailure = Literal["error", "timeout", "gone", "mismatch"]
"""Raised, ran past its limit, no such episode here, or a replay observed something else."""


MAX_REWARD = 1e9
"""Largest magnitude of a reward: squares of a whole batch of them still fit into a 32-bit float."""


class OpenEpisode(msgspec.Struct, frozen=True, tag=True):
    """Start the episode of ``task``; with ``actions``, bring it to where they led by replaying them: the
    observations must be ``observations`` again, otherwise the answer is a failure of kind "mismatch"."""

    trajectory: int
    split: Literal["train", "evaluation"]
    task: int  # index into the split; the same index is always the same task
    actions: tuple[bytes, ...] = ()
    observations: tuple[bytes, ...] = ()


class OpenEpisodeReply(msgspec.Struct, frozen=True, tag=True):
    ids: bytes  # the first prompt
    seconds: float


class StepEpisode(msgspec.Struct, frozen=True, tag=True):
    trajectory: int
    turn: int  # from 0; answered once, a repeat of the last turn gets the same answer again
    action: bytes  # generated ids of this turn
    truncated: bool  # the turn ended by its length limit


class StepEpisodeReply(msgspec.Struct, frozen=True, tag=True):
    observation: bytes  # ids to append, template glue included; empty when done
    reward: float  # total of the episode so far; final when done
    done: bool
    seconds: float


class EpisodeFailed(msgspec.Struct, frozen=True, tag=True):
    """Answer instead of a reply when the infrastructure failed (never a reward of 0)."""

    kind: EnvironmentFailure
    reason: str


class CloseEpisode(msgspec.Struct, frozen=True, tag=True):
    trajectory: int


class Demonstrate(msgspec.Struct, frozen=True, tag=True):
    """Ask for supervised traces of the expert for the warm start; deterministic in (seed, first, count)."""

    seed: int
    first: int
    count: int


class DemonstrateReply(msgspec.Struct, frozen=True, tag=True):
    demonstrations: tuple[Demonstration, ...]


class Describe(msgspec.Struct, frozen=True, tag=True):
    """What the tokenizer of this environment needs from the model and the engine."""


class DescribeReply(msgspec.Struct, frozen=True, tag=True):
    vocabulary_size: int
    stop_ids: tuple[int, ...]
    pad_id: int
    num_train_tasks: int  # 0 = unbounded
    num_evaluation_tasks: int
    can_restore: bool


class DecodeTokens(msgspec.Struct, frozen=True, tag=True):
    """Ask for the text of these ids, to be read by people."""

    parts: tuple[bytes, ...]


class DecodeTokensReply(msgspec.Struct, frozen=True, tag=True):
    texts: tuple[str, ...] | None  # one a part, long ones without their middle; None: it cannot decode


EnvironmentMessage = (
    OpenEpisode
    | OpenEpisodeReply
    | StepEpisode
    | StepEpisodeReply
    | EpisodeFailed
    | CloseEpisode
    | Demonstrate
    | DemonstrateReply
    | Describe
    | DescribeReply
    | DecodeTokens
    | DecodeTokensReply
)
