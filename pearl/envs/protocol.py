"""The environment protocol. An environment owns its tokenizer and chat format: ids in, ids out, append-only.

A task is an index into a split; the same (split, index) is always the same task. Episodes are independent.
"""

from typing import Literal, Protocol, runtime_checkable

import msgspec

Split = Literal["train", "evaluation"]


class InfrastructureError(Exception):
    """The environment itself failed (sandbox gone, disk full): not the agent's fault, never a reward."""


class Observation(msgspec.Struct, frozen=True):
    """Result of one turn; ``reward`` is the episode's return so far, not this step's reward as in Gymnasium."""

    ids: list[int]  # to append to the context, glue included; empty when done
    reward: float  # the episode's total so far: any real number of magnitude up to 1e9, NumPy's and tensors included
    done: bool


class Episode(Protocol):
    """One task being done. Each method may be async or plain; a plain one must be quick, since all episodes of a
    worker wait for it. ``close`` may be omitted by an episode that holds nothing."""

    async def reset(self) -> list[int]:
        """The first prompt's ids."""

    async def step(self, action: list[int], truncated: bool) -> Observation:
        """Apply one turn's generated ids (a stop token included, if any); ``truncated``: a length limit cut the
        turn, which is not Gymnasium's end of an episode."""

    async def close(self) -> None:
        """Release everything; must be harmless twice."""


class EnvironmentSpec(msgspec.Struct, frozen=True):
    vocabulary_size: int
    stop_ids: tuple[int, ...]
    pad_id: int
    num_train_tasks: int  # 0 = unbounded
    num_evaluation_tasks: int
    can_restore: bool  # replaying the same actions gives the same observations
    cut_id: int | None = None  # put where a too long observation was shortened


class Environment(Protocol):
    """``demonstrations`` may be omitted; then ``warm_start.num_steps`` must be 0. Optional, beside these methods:
    ``decode(ids) -> str``, the text of ids for people, and ``solve(split, task) -> list[list[int]]``, the actions of a
    reference solution turn by turn, by which ``pearl check-env`` knows that the task can be solved."""

    def describe(self) -> EnvironmentSpec: ...

    def episode(self, split: Split, task: int) -> Episode: ...

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        """(ids, loss weight a position) of expert episodes; for the supervised warm start."""


class EpisodeLimits(msgspec.Struct, frozen=True):
    """The job's limits on one trajectory, for environments that have to know them."""

    max_turns: int = 6
    max_context_tokens: int = 256
    max_new_tokens_per_turn: int = 4
    max_observation_tokens: int = 4096


@runtime_checkable
class LimitedEnvironment(Protocol):
    """An environment that is given the limits before it describes itself."""

    def set_limits(self, limits: EpisodeLimits) -> None: ...


@runtime_checkable
class ServingEnvironment(Protocol):
    """An environment with work beside its episodes."""

    async def serve(self) -> None:
        """Run on the loop of the episodes from the worker's start until cancelled at its end."""
