"""An environment worker's service over an agent, with a scripted model in place of the engines."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from pearl.envs.agents.environment import AgentEnvironment
from pearl.envs.loader import load_environment
from pearl.envs.own_reward import Reward
from pearl.envs.service import EnvironmentService
from pearl.envs.text.tokenizer import TextTokenizer
from pearl.testing import chat_models as made
from pearl.types.config import Config, EnvironmentConfig, RolloutConfig
from pearl.types.messages.environment import (
    CloseEpisode,
    EpisodeFailed,
    OpenEpisode,
    OpenEpisodeReply,
    StepEpisode,
    StepEpisodeReply,
)

CONFIG = Config(
    environment=EnvironmentConfig(max_turns=4, reset_timeout_s=20.0, step_timeout_s=20.0),
    rollout=RolloutConfig(max_context_tokens=2000, max_new_tokens_per_turn=64),
)
END = "<|im_end|>"


class AgentBench:
    """One trajectory at a time; ``texts`` holds all that it became."""

    def __init__(self, service: EnvironmentService, environment: AgentEnvironment) -> None:
        self.service = service
        self.environment = environment
        self.texts: dict[int, str] = {}
        self._turns: dict[int, int] = {}

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.environment._proven.chat.tokenizer

    async def open(self, task: int = 0, trajectory: int = 1) -> str:
        """The first prompt, or the reason of the failure."""
        self._turns[trajectory] = 0
        reply = await self.service.handle(OpenEpisode(trajectory, "train", task))
        if isinstance(reply, EpisodeFailed):
            return reply.reason
        assert isinstance(reply, OpenEpisodeReply), reply
        self.texts[trajectory] = self._text(reply.ids)
        return self.texts[trajectory]

    async def say(self, text: str, trajectory: int = 1) -> StepEpisodeReply | EpisodeFailed:
        """What the model generates in this turn."""
        action = np.array(self.tokenizer.encode(text), "<i4").tobytes()
        turn = self._turns[trajectory]
        self._turns[trajectory] += 1
        reply = await self.service.handle(StepEpisode(trajectory, turn, action, not text.endswith(END)))
        assert isinstance(reply, StepEpisodeReply | EpisodeFailed)
        if isinstance(reply, StepEpisodeReply):
            self.texts[trajectory] += text + self._text(reply.observation)
        return reply

    async def play(self, answers: Sequence[str], trajectory: int = 1) -> StepEpisodeReply | EpisodeFailed:
        """The reply to the last of several turns."""
        reply = None
        for text in answers:
            reply = await self.say(text, trajectory)
        assert reply is not None
        return reply

    async def close(self, trajectory: int = 1) -> None:
        await self.service.handle(CloseEpisode(trajectory))

    def _text(self, packed: bytes) -> str:
        return self.tokenizer.decode(np.frombuffer(packed, "<i4").tolist())


@contextmanager
def agent_bench(
    directory: Path,
    name: str,
    options: dict[str, int | float | str | bool],
    reward: Reward | None = None,
    **rollout: int,
) -> Iterator[AgentBench]:
    made.make_directory(directory, "hermes")
    environment = load_environment(name, {"template": "chatml-tools", **options}, str(directory))
    assert isinstance(environment, AgentEnvironment)
    config = msgspec.structs.replace(CONFIG, rollout=msgspec.structs.replace(CONFIG.rollout, **rollout))
    service = EnvironmentService(config, environment, reward=reward)
    service.start()
    yield AgentBench(service, environment)
