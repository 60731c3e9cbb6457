"""What an environment worker is told and asked, and by whom it is answered."""

import logging
import math
from typing import assert_never

import msgspec

from pearl.envs.decoding import decode_parts, unpacked
from pearl.envs.episodes import MAX_OPEN_EPISODES, Episodes
from pearl.envs.own_reward import Reward
from pearl.envs.protocol import Environment, EpisodeLimits, LimitedEnvironment, ServingEnvironment
from pearl.envs.response_validator import ResponseValidator
from pearl.envs.sandbox_thread import SandboxThread
from pearl.types.config import Config
from pearl.types.messages.control import Heartbeat
from pearl.types.messages.environment import (
    CloseEpisode,
    DecodeTokens,
    DecodeTokensReply,
    Demonstrate,
    DemonstrateReply,
    Describe,
    DescribeReply,
    OpenEpisode,
    StepEpisode,
)

log = logging.getLogger(__name__)

Message = OpenEpisode | StepEpisode | CloseEpisode | Demonstrate | Describe | DecodeTokens
"""What an environment worker gets; all are asked except CloseEpisode, which is told."""


class EnvironmentService:
    """``start`` before anything else, ``stop`` at the end."""

    def __init__(
        self,
        config: Config,
        environment: Environment,
        max_open: int = MAX_OPEN_EPISODES,
        reward: Reward | None = None,
    ) -> None:
        self._environment = environment
        if isinstance(environment, LimitedEnvironment):
            environment.set_limits(_limits(config))
        self._spec = environment.describe()
        self._config = config
        self._thread = SandboxThread()
        limits = config.environment
        self._check = ResponseValidator(
            self._spec, config.rollout.max_context_tokens, limits.max_observation_tokens
        )
        self.episodes = Episodes(
            environment,
            self._spec,
            self._check,
            self._thread,
            limits,
            max_open,
            config.rollout.trajectory_deadline_s,
            reward,
        )

    def start(self) -> None:
        self._thread.start()
        if isinstance(self._environment, ServingEnvironment):
            self._thread.post(self._environment.serve, math.inf, "the environment's own work ended")

    async def stop(self) -> None:
        await self.episodes.close_all()
        self._thread.stop()

    def heartbeat(self) -> Heartbeat:
        progress, pending = self._thread.beat()
        return Heartbeat(progress, "", pending)

    async def handle(self, message: Message) -> msgspec.Struct | None:
        """Answer one message. A CodeError, LimitError or BadAnswerError (demonstrations only) that it raises is
        the answer."""
        match message:
            case StepEpisode():
                return await self.episodes.step(message)
            case OpenEpisode():
                return await self.episodes.open(message)
            case CloseEpisode():
                self.episodes.close(message)
                return None
            case Demonstrate():
                return await self._demonstrate(message)
            case Describe():
                return self._describe()
            case DecodeTokens():
                return await self._decode(message)
            case _:
                assert_never(message)

    def _describe(self) -> DescribeReply:
        spec = self._spec
        return DescribeReply(
            vocabulary_size=spec.vocabulary_size,
            stop_ids=spec.stop_ids,
            pad_id=spec.pad_id,
            num_train_tasks=spec.num_train_tasks,
            num_evaluation_tasks=spec.num_evaluation_tasks,
            can_restore=spec.can_restore,
        )

    async def _decode(self, request: DecodeTokens) -> DecodeTokensReply:
        async def make() -> tuple[str, ...] | None:
            return decode_parts(self._environment, [unpacked(part) for part in request.parts])

        return DecodeTokensReply(await self._thread.call(make, self._config.runtime.start_timeout_s))

    async def _demonstrate(self, request: Demonstrate) -> DemonstrateReply:
        async def make() -> list[tuple[list[int], list[float]]]:
            method = getattr(self._environment, "demonstrations", None)
            return [] if method is None else method(request.seed, request.first, request.count)

        made = await self._thread.call(make, self._config.runtime.start_timeout_s)
        return DemonstrateReply(tuple(self._check.demonstration(ids, weights) for ids, weights in made))


def _limits(config: Config) -> EpisodeLimits:
    return EpisodeLimits(
        max_turns=config.environment.max_turns,
        max_context_tokens=config.rollout.max_context_tokens,
        max_new_tokens_per_turn=config.rollout.max_new_tokens_per_turn,
        max_observation_tokens=config.environment.max_observation_tokens,
    )
