"""The smallest agent: ``async def rollout(task, client) -> float``, named as ``package.module:rollout``."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pearl.envs.agents.client import Client
from pearl.envs.agents.environment import AgentEnvironment
from pearl.envs.agents.exchange import Exchange
from pearl.envs.agents.tasks import TASK_OPTIONS, load_tasks
from pearl.envs.text.options import ChatOptions, make_chat, split_options

Rollout = Callable[[Any, Client], Awaitable[float]]


def make_rollout_environment(
    rollout: Rollout, tasks: Callable[..., Any] | None, options: Mapping[str, Any], model_path: str
) -> AgentEnvironment:
    """An environment of the function; ``tasks`` is the one beside it that lists its tasks, if there is one.

    Raises:
        ValueError: an option is wrong, or there are no tasks.
    """
    chat, rest = split_options(options)
    unknown = sorted(set(rest) - set(TASK_OPTIONS))
    if unknown:
        known = ", ".join((*TASK_OPTIONS, *ChatOptions.__struct_fields__))
        raise ValueError(f"environment.options.{unknown[0]}: is unknown; a rollout function takes {known}")
    task_sets = load_tasks(rest, tasks)

    async def agent(task: Any, exchange: Exchange) -> float:
        return await rollout(task, Client(exchange))

    return AgentEnvironment(agent, task_sets, make_chat(chat, model_path))
