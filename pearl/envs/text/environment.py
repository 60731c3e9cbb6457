"""Makes an environment of ids of one in text.

A tool call that cannot be read is not given to the episode: the model gets an error message and its turn is gone.
"""

import logging
import time
from collections.abc import Sequence

import msgspec

from pearl.envs.own_reward import TranscribedEpisode, Transcript
from pearl.envs.protocol import EnvironmentSpec, EpisodeLimits, Observation, Split
from pearl.envs.text.base import TextEnvironment, TextEpisode
from pearl.envs.text.conversation import Conversation
from pearl.envs.text.messages import Message, check_messages, check_tools
from pearl.envs.text.options import ProvenChat
from pearl.runtime.rate_limited_log import RateLimitedLogger

log = logging.getLogger(__name__)


class TextCounters(msgspec.Struct):
    """What happened to answers, over the life of an environment worker."""

    answers: int = 0
    unread_calls: int = 0  # answers with a tool call that could not be read


class RenderedEnvironment:
    """A text environment as one of ids."""

    def __init__(self, environment: TextEnvironment, proven: ProvenChat) -> None:
        self._environment = environment
        self._proven = proven
        self._limits = EpisodeLimits()
        self._notes = RateLimitedLogger(log)
        self.counters = TextCounters()

    def set_limits(self, limits: EpisodeLimits) -> None:
        self._limits = limits

    def describe(self) -> EnvironmentSpec:
        environment = self._environment
        return spec_of(
            self._proven,
            environment.num_train_tasks,
            environment.num_evaluation_tasks,
            can_restore=environment.can_restore,
        )

    def episode(self, split: Split, task: int) -> "RenderedEpisode":
        return RenderedEpisode(
            self._environment.episode(split, task), Conversation(self._proven, self._limits), self
        )

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        """Text environments have no expert: set ``warm_start.num_steps = 0``."""
        return []

    def solve(self, split: Split, task: int) -> list[list[int]] | None:
        """Make the reference solution's answers ids; None where the environment has none."""
        solution = self._environment.solve(split, task)
        return None if solution is None else [self._proven.chat.say(answer) for answer in solution]

    def describe_chat(self) -> str:
        return self._proven.describe()

    def decode(self, ids: Sequence[int]) -> str:
        return self._proven.chat.tokenizer.decode(ids)

    def note_answer(self, failure: str) -> None:
        self.counters.answers += 1
        if failure:
            self.counters.unread_calls += 1
            self._notes.warning(
                time.monotonic(),
                "a tool call could not be read: %s (%d of %d answers so far)",
                failure,
                self.counters.unread_calls,
                self.counters.answers,
            )


class RenderedEpisode(TranscribedEpisode):
    def __init__(
        self, episode: TextEpisode, conversation: Conversation, environment: RenderedEnvironment
    ) -> None:
        self._episode = episode
        self._conversation = conversation
        self._environment = environment
        self._reward = 0.0

    async def reset(self) -> list[int]:
        messages, tools = await self._episode.reset()
        return self._conversation.begin(check_messages(messages), check_tools(tools))

    async def step(self, action: list[int], truncated: bool) -> Observation:
        answer = self._conversation.answer(action)
        self._environment.note_answer(answer.failure)
        if answer.failure:
            cut = "; the answer was cut at its limit" if truncated else ""
            new: Sequence[Message] = [self._conversation.failure_message(answer.failure + cut)]
            done = False
        else:
            new, self._reward, done = await self._episode.step(answer.message)
        if done:
            return Observation([], self._reward, True)
        ids, _ = self._conversation.extend(check_messages(new))
        return Observation(ids, self._reward, False)

    async def close(self) -> None:
        await self._episode.close()

    def transcript(self) -> Transcript:
        return Transcript(self._episode, list(self._conversation.messages))


def spec_of(
    proven: ProvenChat, num_train_tasks: int, num_evaluation_tasks: int, *, can_restore: bool
) -> EnvironmentSpec:
    tokenizer = proven.chat.tokenizer
    return EnvironmentSpec(
        vocabulary_size=tokenizer.vocabulary_size,
        stop_ids=proven.chat.stop_ids,
        pad_id=tokenizer.pad_id,
        num_train_tasks=num_train_tasks,
        num_evaluation_tasks=num_evaluation_tasks,
        can_restore=can_restore,
    )
