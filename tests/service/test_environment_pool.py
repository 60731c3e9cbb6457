"""The environment workers from the coordinator's side, with a fake of what lies between."""

import asyncio
from pathlib import Path
from typing import Any

from pearl.runtime.token_store import TokenStore
from pearl.service.clients.environment_pool import EnvironmentPool
from pearl.service.loop.inbox import Inbox
from pearl.types import commands
from pearl.types.config import Config
from pearl.types.ids import OpId, TrajectoryId
from pearl.types.messages.environment import EpisodeFailed


class FailingServer:
    """Every episode of every worker fails."""

    async def call(self, *_: Any, **__: Any) -> EpisodeFailed:
        return EpisodeFailed("error", "step: KeyError: 'a' (mine.py:8)")

    def notify(self, *_: Any) -> None:
        """Nobody is there."""


class LivingProcesses:
    async def start(self, process: Any) -> Any:
        return process

    async def wait_exited(self, process: Any) -> Any:
        await asyncio.Event().wait()


class Process:
    name = "environment.0.1"

    def __init__(self, log_directory: Path) -> None:
        self.log_directory = log_directory


async def test_where_the_whole_traceback_is_is_said_once_a_worker(tmp_path: Path) -> None:
    config, said = Config(), list[str]()
    inbox = Inbox(config.runtime.queue_messages)
    store = TokenStore(tmp_path / "tokens")
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []

        def spawn(name: str, work: Any) -> None:
            tasks.append(group.create_task(work, name=name))

        server: Any = FailingServer()
        processes: Any = LivingProcesses()
        pool = EnvironmentPool(config, server, processes, store, inbox, spawn, said.append)
        process: Any = Process(tmp_path / "logs")
        keeping = group.create_task(pool._live(process), name="keep")
        for number in range(3):
            pool.open(commands.OpenEpisode(OpId(number + 1), TrajectoryId(number), False, 0, 0))
        await asyncio.wait(tasks)
        keeping.cancel()
    store.close()
    assert said == [
        f"environment: an episode's code failed; the whole traceback is in {tmp_path}/logs/rank0.log"
    ]
