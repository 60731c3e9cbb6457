"""Rewards by ``environment.reward``: a person's function in the place of what the environment says.

It is called after every turn, since a trajectory may end at any of them by a limit; its last answer counts.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pearl.envs.protocol import Episode, Observation, Split
from pearl.envs.response_validator import as_reward
from pearl.envs.sandbox_thread import finished
from pearl.runtime.extensions import defined_at, load_extension

KEY = "environment.reward"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward can see of a trajectory: everything up to the turn that has just been played."""

    split: Split
    task: int
    prompt: Sequence[int]
    actions: Sequence[Sequence[int]]  # the generated ids, turn by turn
    observations: Sequence[Sequence[int]]  # what followed them
    truncated: bool  # the newest action met a limit before a stop id
    done: bool  # the environment has ended it
    reward: float  # the environment's own, so far
    episode: Any  # the environment's own object; the task of a rollout function or a harness
    messages: Sequence[dict[str, Any]]  # where the environment speaks in text, else empty


class Transcript(NamedTuple):
    episode: Any
    messages: Sequence[dict[str, Any]]


class TranscribedEpisode(ABC):
    """An episode that PEARL made around something of a person's."""

    @abstractmethod
    def transcript(self) -> Transcript: ...


class Reward(NamedTuple):
    name: str
    function: Callable[[Attempt], Any]  # of a number, or async


def load_reward(name: str) -> Reward | None:
    """Load the function that ``environment.reward`` names; None for "".

    Raises:
        ValueError: it cannot be loaded, or does not take one argument.
    """
    if not name:
        return None
    function = load_extension(KEY, name)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(
            f'{KEY} = "{name}": {error} ({defined_at(function)}); a reward takes one argument, a '
            "pearl.envs.own_reward.Attempt"
        ) from None
    return Reward(name, function)


class RewardedEpisode:
    def __init__(self, episode: Episode, reward: Reward, split: Split, task: int) -> None:
        self._episode = episode
        self._reward = reward
        self._split: Split = split
        self._task = task
        self._prompt: list[int] = []
        self._actions: list[list[int]] = []
        self._observations: list[list[int]] = []

    async def reset(self) -> list[int]:
        self._prompt = await finished(self._episode.reset())
        return self._prompt

    async def step(self, action: list[int], truncated: bool) -> Observation:
        seen = await finished(self._episode.step(action, truncated))
        if not isinstance(seen, Observation):
            return seen  # refused by whoever validates it
        self._actions.append(action)
        self._observations.append(seen.ids)
        attempt = self._attempt(seen, truncated)
        value = as_reward(await finished(self._reward.function(attempt)), f'{KEY} = "{self._reward.name}"')
        return msgspec.structs.replace(seen, reward=value)

    def _attempt(self, seen: Observation, truncated: bool) -> Attempt:
        episode = self._episode
        transcript = (
            episode.transcript() if isinstance(episode, TranscribedEpisode) else Transcript(episode, ())
        )
        return Attempt(
            split=self._split,
            task=self._task,
            prompt=self._prompt,
            actions=tuple(self._actions),
            observations=tuple(self._observations),
            truncated=truncated,
            done=seen.done,
            reward=seen.reward,
            episode=transcript.episode,
            messages=transcript.messages,
        )

    async def close(self) -> None:
        close = getattr(self._episode, "close", None)
        if close is not None:
            await finished(close())
