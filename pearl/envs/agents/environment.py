"""An environment whose episodes are agents that own their loop.

An agent runs from the episode's ``reset`` to its end or to ``close``, whichever is first, as a task of its own. What
it returns is the reward. What it raises is a failure of the infrastructure, never a reward, unless it only passes on
that the trajectory has reached a limit: then it counts as truncated, with reward 0.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from pearl.envs.agents.errors import TruncatedError
from pearl.envs.agents.exchange import AgentCounters, Exchange, Prompt, Truncation
from pearl.envs.agents.gateway import Gateway
from pearl.envs.agents.tasks import TaskSets
from pearl.envs.own_reward import TranscribedEpisode, Transcript
from pearl.envs.protocol import EnvironmentSpec, EpisodeLimits, InfrastructureError, Observation, Split
from pearl.envs.text.environment import spec_of
from pearl.envs.text.options import ProvenChat
from pearl.runtime.extensions import describe_error

log = logging.getLogger(__name__)

START_LIMIT_S = 20.0
"""For what runs beside the episodes to be there; it binds a port at most."""
Agent = Callable[[Any, Exchange], Awaitable[float]]
"""Works on one task by asking through the exchange; returns the reward."""


class Outcome(NamedTuple):
    """Of an agent that has ended: what it returned or what it raised."""

    reward: object = None
    error: BaseException | None = None


class AgentEnvironment:
    def __init__(
        self,
        agent: Agent,
        tasks: TaskSets,
        proven: ProvenChat,
        counters: AgentCounters | None = None,
        gateway: Gateway | None = None,
    ) -> None:
        """The gateway, where the agents need one, is up while episodes are open."""
        self._agent = agent
        self._gateway = gateway
        self._failure = "the environment worker is ending"
        self._tasks = tasks
        self._proven = proven
        self._limits = EpisodeLimits()
        self._group: asyncio.TaskGroup | None = None
        self._started = asyncio.Event()
        self.counters = counters or AgentCounters()

    def set_limits(self, limits: EpisodeLimits) -> None:
        self._limits = limits

    def describe(self) -> EnvironmentSpec:
        num_train, num_evaluation = len(self._tasks.train), len(self._tasks.evaluation)
        return spec_of(self._proven, num_train, num_evaluation, can_restore=False)

    def episode(self, split: Split, task: int) -> "AgentEpisode":
        exchange = Exchange(self._proven, self._limits, self.counters)
        return AgentEpisode(self, exchange, self._tasks.get(split, task))

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        """Agents have no expert: set ``warm_start.num_steps = 0``."""
        return []

    def describe_chat(self) -> str:
        return self._proven.describe()

    def decode(self, ids: Sequence[int]) -> str:
        return self._proven.chat.tokenizer.decode(ids)

    async def serve(self) -> None:
        """Own the agents' tasks, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._gateway is not None:
                    await self._gateway.start(group)
                self._group = group
                self._started.set()
                await asyncio.Event().wait()  # until cancelled
        except OSError as error:
            self._failure = f"the agents' endpoint cannot listen: {error}"
            raise
        finally:
            self._group = None
            self._started.set()
            if self._gateway is not None:
                await self._gateway.stop()
            log.info("agents: %s", self.counters)

    async def start_agent(self, task: Any, exchange: Exchange) -> asyncio.Task[Outcome]:
        async with asyncio.timeout(START_LIMIT_S):
            await self._started.wait()
        if self._group is None:
            raise InfrastructureError(self._failure)
        return self._group.create_task(_contained(self._agent, task, exchange), name="agent")


class AgentEpisode(TranscribedEpisode):
    def __init__(self, environment: AgentEnvironment, exchange: Exchange, task: Any) -> None:
        self._environment = environment
        self._exchange = exchange
        self._task = task
        self._agent: asyncio.Task[Outcome] | None = None

    async def reset(self) -> list[int]:
        self._agent = await self._environment.start_agent(self._task, self._exchange)
        self._agent.add_done_callback(lambda _: self._exchange.finish())
        match await self._exchange.next():
            case Prompt(ids):
                return ids
            case Truncation(ids):
                raise InfrastructureError(f"the first prompt does not fit: {self._exchange.truncated}")
        reward = await self._end(self._agent)
        raise InfrastructureError(f"the agent returned {reward} without a call of the model")

    async def step(self, action: list[int], truncated: bool) -> Observation:
        assert self._agent is not None
        self._exchange.answer(action, truncated)
        match await self._exchange.next():
            case Prompt(ids):
                return Observation(ids, 0.0, False)
            case Truncation(ids):  # the core sees that nothing fits any more, and ends it
                return Observation(ids, await self._end(self._agent), False)
        return Observation([], await self._end(self._agent), True)

    async def _end(self, agent: asyncio.Task[Outcome]) -> float:
        """The reward, once the agent has ended."""
        await asyncio.wait({agent})
        if agent.cancelled():
            raise InfrastructureError("the environment worker is ending")
        reward, error = agent.result()
        if self._exchange.broken:
            raise InfrastructureError(self._exchange.broken)
        if error is None:
            return _checked(reward)
        if self._exchange.truncated is not None and _passes_on(error):
            return 0.0
        refused = f" (after {self._exchange.edited})" if self._exchange.edited else ""
        raise InfrastructureError(f"the agent failed: {describe_error(error)}{refused}") from error

    async def close(self) -> None:
        self._exchange.close()
        if self._agent is not None:
            self._agent.cancel()
            await asyncio.wait({self._agent})

    def transcript(self) -> Transcript:
        return Transcript(self._task, self._exchange.messages())


async def _contained(agent: Agent, task: Any, exchange: Exchange) -> Outcome:
    """Whatever foreign code raises ends its own episode only, SystemExit included; its cancellation stays one."""
    try:
        return Outcome(await agent(task, exchange))
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
            raise
        return Outcome(error=error)


def _passes_on(error: BaseException | None) -> bool:
    """Whether it says, or was raised over, that the trajectory has reached a limit."""
    while error is not None and not isinstance(error, TruncatedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _checked(reward: object) -> float:
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise InfrastructureError(
            f"the agent returned {str(reward)[:100]}: a finite number is needed as reward"
        )
    return float(reward)
