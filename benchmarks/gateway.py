"""What an environment's turn costs by each of its doors: ids, text, a rollout function, and the HTTP gateway.

64 trajectories at once on one environment service; the model is scripted and takes half a second a turn on average,
so that turns overlap as in a run. Measured is the service's answer to a step: the agent is given its text and asks
again, with a conversation that grows. The gateway's agents are in another process, as real ones. Then 512 agents wait
idle, and the memory that they cost is read. The peer in the same run is the id path. Needs 2 cores and a minute.

    python benchmarks/gateway.py [--agents 64] [--turns 10] [--idle 512]
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

from pearl.envs.agents.client import Client
from pearl.envs.agents.environment import Agent, AgentEnvironment
from pearl.envs.agents.exchange import AgentCounters, Exchange
from pearl.envs.agents.gateway import Gateway
from pearl.envs.agents.tasks import TaskSets
from pearl.envs.protocol import Environment, EnvironmentSpec, Observation, Split
from pearl.envs.service import EnvironmentService
from pearl.envs.text import Message, TextEnvironment, TextEpisode, Tool
from pearl.envs.text.environment import RenderedEnvironment
from pearl.envs.text.options import ProvenChat
from pearl.testing import chat_models
from pearl.types.config import Config, EnvironmentConfig, RolloutConfig
from pearl.types.messages.environment import CloseEpisode, OpenEpisode, StepEpisode

PROMPT = "Repair this function. " * 20
FOLLOW_UP = "The test says: expected 3, got 4. " * 4
ANSWER = "The loop ends one too early, so I change the bound of the range. " * 2 + "<|im_end|>"
PACE_S = 0.5
TARGET_OVERHEAD_S = 3e-3
TARGET_IDLE_MB = 200.0
CONFIG = Config(
    environment=EnvironmentConfig(max_turns=1 << 20, reset_timeout_s=120.0, step_timeout_s=120.0),
    rollout=RolloutConfig(max_context_tokens=1 << 20, max_new_tokens_per_turn=512),
)


class Measured(NamedTuple):
    seconds: list[float]  # a step
    cpu_s: float  # of the environment's process, a turn


class IdEpisode:
    """The path without text: ids that were made before."""

    def __init__(self, prompt: list[int], follow_up: list[int]) -> None:
        self._prompt, self._follow_up = prompt, follow_up

    async def reset(self) -> list[int]:
        return self._prompt

    async def step(self, action: list[int], truncated: bool) -> Observation:
        return Observation(self._follow_up, 0.0, False)

    async def close(self) -> None: ...


class IdEnvironment:
    def __init__(self, spec: EnvironmentSpec, prompt: list[int], follow_up: list[int]) -> None:
        self._spec, self._prompt, self._follow_up = spec, prompt, follow_up

    def describe(self) -> EnvironmentSpec:
        return self._spec

    def episode(self, split: Split, task: int) -> IdEpisode:
        return IdEpisode(self._prompt, self._follow_up)

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        return []


class Talk(TextEpisode):
    async def reset(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        return [{"role": "user", "content": PROMPT}], []

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        return [{"role": "user", "content": FOLLOW_UP}], 0.0, False


class TalkEnvironment(TextEnvironment):
    def episode(self, split: Split, task: int) -> TextEpisode:
        return Talk()


async def talk(client: Any) -> float:
    """The agent of the function and, with another client, of the gateway."""
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    while True:
        reply = await client.chat.completions.create(messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": FOLLOW_UP}]


def function_environment(proven: ProvenChat) -> AgentEnvironment:
    async def agent(task: Any, exchange: Exchange) -> float:
        return await talk(Client(exchange))

    return AgentEnvironment(agent, TaskSets([None], []), proven)


def gateway_environment(proven: ProvenChat, clients: asyncio.subprocess.Process) -> AgentEnvironment:
    counters = AgentCounters()
    gateway = Gateway(counters)
    loop = asyncio.get_running_loop()

    async def agent(task: Any, exchange: Exchange) -> float:
        key = gateway.admit(exchange)
        assert clients.stdin is not None
        loop.call_soon_threadsafe(clients.stdin.write, f"{gateway.url} {key}\n".encode())
        try:
            await asyncio.Event().wait()  # until the trajectory is closed
        finally:
            gateway.dismiss(key)
        return 0.0

    made: Agent = agent
    return AgentEnvironment(made, TaskSets([None], []), proven, counters, gateway)


async def measure(environment: Environment, action: bytes, agents: int, turns: int) -> Measured:
    service = EnvironmentService(CONFIG, environment)
    service.start()
    seconds: list[float] = []
    try:
        for trajectory in range(agents):
            await service.handle(OpenEpisode(trajectory, "train", 0))
        before = time.process_time()
        async with asyncio.TaskGroup() as group:
            for trajectory in range(agents):
                group.create_task(_trajectory(service, trajectory, action, turns, seconds))
        cpu_s = (time.process_time() - before) / (agents * turns)
        for trajectory in range(agents):
            await service.handle(CloseEpisode(trajectory))
    finally:
        await service.stop()
    return Measured(seconds, cpu_s)


async def _trajectory(
    service: EnvironmentService, trajectory: int, action: bytes, turns: int, seconds: list[float]
) -> None:
    draws = random.Random(trajectory)
    for turn in range(turns):
        await asyncio.sleep(draws.uniform(0, 2 * PACE_S))
        began = time.perf_counter()
        reply = await service.handle(StepEpisode(trajectory, turn, action, False))
        seconds.append(time.perf_counter() - began)
        assert not isinstance(reply, Exception)
        assert hasattr(reply, "observation"), reply


async def idle_megabytes(environment: AgentEnvironment, agents: int) -> float:
    service = EnvironmentService(CONFIG, environment)
    service.start()
    try:
        await service.handle(OpenEpisode(agents, "train", 0))
        before = psutil.Process().memory_info().rss
        for trajectory in range(agents):
            await service.handle(OpenEpisode(trajectory, "train", 0))
        return (psutil.Process().memory_info().rss - before) / 1e6
    finally:
        await service.stop()


async def start_clients() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--clients", stdin=asyncio.subprocess.PIPE
    )


async def clients() -> None:
    """The other process: an agent for each line "URL KEY", over one connection each."""
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            url, key = line.split()
            group.create_task(_speak(session, url, key))


async def _speak(session: aiohttp.ClientSession, url: str, key: str) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    headers = {"Authorization": f"Bearer {key}"}
    while True:
        try:
            async with session.post(
                f"{url}/chat/completions", json={"messages": messages}, headers=headers
            ) as response:
                if response.status != 200:
                    return  # the trajectory has ended
                answered = json.loads(await response.read())
        except aiohttp.ClientError:
            return
        messages += [answered["choices"][0]["message"], {"role": "user", "content": FOLLOW_UP}]


async def run(agents: int, turns: int, idle: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        proven = chat_models.make_proven(Path(directory), "hermes")
    tokenizer = proven.chat.tokenizer
    action = np.array(tokenizer.encode(ANSWER), "<i4").tobytes()
    text = RenderedEnvironment(TalkEnvironment(), proven)
    prompt = proven.chat.prompt([{"role": "user", "content": PROMPT}], [])
    follow_up = tokenizer.encode(FOLLOW_UP)
    process = await start_clients()
    environments: dict[str, Environment] = {
        "ids": IdEnvironment(text.describe(), prompt, follow_up),
        "text": text,
        "function": function_environment(proven),
        "gateway": gateway_environment(proven, process),
    }
    print(
        f"{agents} trajectories at once, {turns} turns each, of {len(action) // 4} + {len(follow_up)} tokens"
    )
    medians = {}
    for name, environment in environments.items():
        seconds, cpu_s = await measure(environment, action, agents, turns)
        medians[name] = statistics.median(seconds)
        p95 = statistics.quantiles(seconds, n=20)[-1]
        print(
            f"{name:9} median {medians[name] * 1e3:6.2f} ms  p95 {p95 * 1e3:6.2f} ms  "
            f"cpu {cpu_s * 1e3:5.2f} ms a turn  ratio to ids {medians[name] / medians['ids']:5.1f}"
        )
    overhead_s = medians["gateway"] - medians["ids"]
    megabytes = await idle_megabytes(gateway_environment(proven, process), idle)
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    print(f"gateway over ids: {overhead_s * 1e3:.2f} ms a turn (target {TARGET_OVERHEAD_S * 1e3:g})")
    print(f"{idle} idle agents: {megabytes:.0f} MB (target {TARGET_IDLE_MB:g})")
    return int(overhead_s > TARGET_OVERHEAD_S or megabytes > TARGET_IDLE_MB)


def main() -> int:
    parser = argparse.ArgumentParser(description="What an environment's turn costs by each of its doors.")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--idle", type=int, default=512)
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        asyncio.run(clients())
        return 0
    return asyncio.run(run(options.agents, options.turns, options.idle))


if __name__ == "__main__":
    sys.exit(main())
