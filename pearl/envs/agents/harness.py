"""``environment.name = "harness"``: an agent that is a program of its own, spoken to through the gateway.

The program finds OPENAI_BASE_URL, OPENAI_API_KEY and PEARL_TASK (a JSON file) in its environment. When it has ended,
``environment.options.score`` names the function that gives the reward.
"""

import asyncio
import inspect
import shlex
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from pearl.envs.agents.environment import AgentEnvironment
from pearl.envs.agents.exchange import AgentCounters, Exchange
from pearl.envs.agents.gateway import MODEL, Gateway
from pearl.envs.agents.program import Program, ProgramRun
from pearl.envs.agents.tasks import TASK_OPTIONS, load_tasks
from pearl.envs.protocol import InfrastructureError
from pearl.envs.text.options import ChatOptions, make_chat, split_options
from pearl.runtime.extensions import load_extension

HALTED_GRACE_S = 5.0
"""For a program to end by itself, or to go on as it should, once the model answers no more; then it is ended."""
Score = Callable[[Any, ProgramRun], Any]
OPTIONS = ("command", "score", *TASK_OPTIONS)


def make_harness_environment(options: Mapping[str, Any], model_path: str) -> AgentEnvironment:
    """An environment of the program.

    Raises:
        ValueError: an option is wrong or missing, or there are no tasks.
    """
    chat, rest = split_options(options)
    unknown = sorted(set(rest) - set(OPTIONS))
    if unknown:
        known = ", ".join((*OPTIONS, *ChatOptions.__struct_fields__))
        raise ValueError(f"environment.options.{unknown[0]}: is unknown; a harness takes {known}")
    command = _command(rest.get("command"))
    score, beside = _score(rest.get("score"))
    tasks = load_tasks(rest, getattr(beside, "tasks", None))
    counters = AgentCounters()
    gateway = Gateway(counters)

    async def agent(task: Any, exchange: Exchange) -> float:
        run = _Harness(command, score, gateway, exchange)
        return await run.reward(task)

    return AgentEnvironment(agent, tasks, make_chat(chat, model_path), counters, gateway)


class _Harness:
    def __init__(self, command: list[str], score: Score, gateway: Gateway, exchange: Exchange) -> None:
        self._command = command
        self._score = score
        self._gateway = gateway
        self._exchange = exchange

    async def reward(self, task: Any) -> float:
        key = self._gateway.admit(self._exchange)
        try:
            async with Program(self._command, task, self._settings(key)) as program:
                await self._wait_exited(program)
                self._gateway.dismiss(key)
                return await self._scored(task, program)
        finally:
            self._gateway.dismiss(key)

    def _settings(self, key: str) -> dict[str, str]:
        url = self._gateway.url
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # its clients add it
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": MODEL,
        }

    async def _wait_exited(self, program: Program) -> None:
        """Wait until the program has ended, by itself or because it runs on after the model's last answer."""
        async with asyncio.TaskGroup() as group:
            limiting = group.create_task(self._end_when_halted(program), name="harness limit")
            await program.wait()
            limiting.cancel()

    async def _end_when_halted(self, program: Program) -> None:
        halted = self._exchange.halted
        while True:
            await halted.wait()
            await asyncio.sleep(HALTED_GRACE_S)
            if halted.is_set():
                program.terminate()
                return

    async def _scored(self, task: Any, program: Program) -> float:
        exchange = self._exchange
        run = ProgramRun(
            exit_code=program.exit_code,
            output=program.output,
            directory=program.directory / "work",
            messages=exchange.messages(),
            truncated=exchange.truncated is not None,
        )
        if not exchange.num_answers and exchange.truncated is None:
            raise InfrastructureError(
                f"the harness ended with exit code {run.exit_code} without a call of the model: {_tail(run.output)}"
            )
        if run.exit_code and exchange.edited:
            raise InfrastructureError(
                f"the harness failed after a call that could not be answered ({exchange.edited}): "
                f"{_tail(run.output)}"
            )
        if inspect.iscoroutinefunction(self._score):
            scored: float = await self._score(task, run)
            return scored
        return await asyncio.to_thread(self._score, task, run)


def _command(given: object) -> list[str]:
    if not isinstance(given, str) or not given.strip():
        raise ValueError(
            'environment.options.command: is missing; name the program, for example command = "my-agent --yes"'
        )
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise ValueError(f'environment.options.command = "{given}": {error}') from None
    if shutil.which(command[0]) is None:
        raise ValueError(f'environment.options.command = "{given}": there is no program {command[0]} on PATH')
    return command


def _score(given: object) -> tuple[Score, Any]:
    """The function and its module."""
    if not given:
        raise ValueError(
            "environment.options.score: is missing; name the function that gives the reward as "
            '"package.module:function"; it is called with the task and a ProgramRun'
        )
    score = load_extension("environment.options.score", str(given))
    return score, inspect.getmodule(score)


def _tail(output: str) -> str:
    return output[-500:].strip() or "it wrote nothing"
