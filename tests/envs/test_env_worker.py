"""The environment worker as a real process, spoken to through a real server."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import odd_environments as odd
import pytest

from pearl.envs.bugfix.tokenizer import decode, encode
from pearl.runtime.clock import MonotonicClock
from pearl.runtime.errors import RemoteError
from pearl.runtime.inbound import Inbound, Notification, PeerJoined
from pearl.runtime.rpc_server import RpcServer
from pearl.types.config import Config, EnvironmentConfig
from pearl.types.messages.control import ControlMessage, Heartbeat, Shutdown
from pearl.types.messages.environment import (
    CloseEpisode,
    Demonstrate,
    DemonstrateReply,
    Describe,
    DescribeReply,
    EnvironmentMessage,
    EpisodeFailed,
    OpenEpisode,
    OpenEpisodeReply,
    StepEpisode,
    StepEpisodeReply,
)

LIMIT_S = 20.0
PEER = "environment.0.1"
RUN_ID = "test-environment-worker"


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = RpcServer(
        "tcp://127.0.0.1:0",
        run_id=RUN_ID,
        messages=ControlMessage | EnvironmentMessage,
        queue_messages=256,
        max_frame_bytes=1 << 20,
        clock=MonotonicClock(),
    )
    async with server:
        yield server


@contextmanager
def worker(directory: Path, address: str, environment: EnvironmentConfig) -> Iterator[subprocess.Popen[str]]:
    path = directory / "config.json"
    path.write_bytes(msgspec.json.encode(Config(environment=environment)))
    options = ["--address", address, "--run-id", RUN_ID, "--slot", "0", "--incarnation", "1"]
    command = [sys.executable, "-m", "pearl.envs.worker", *options, "--config", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def joined(
    server: RpcServer, directory: Path, environment: EnvironmentConfig
) -> AsyncIterator[subprocess.Popen[str]]:
    with worker(directory, server.address, environment) as process:
        await heard(server, lambda message: isinstance(message, PeerJoined) and message.peer == PEER)
        yield process


async def heard(server: RpcServer, wanted: Callable[[Inbound], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not wanted(await server.receive()):
            pass


async def ask(server: RpcServer, message: msgspec.Struct) -> msgspec.Struct:
    return await server.call(PEER, message, deadline_s=LIMIT_S)


async def ended(process: subprocess.Popen[str]) -> int:
    return await asyncio.to_thread(process.wait, LIMIT_S)


def pack(text: str) -> bytes:
    return np.array(encode(text), "<i4").tobytes()


def unpack(ids: bytes) -> str:
    return decode(np.frombuffer(ids, "<i4").tolist())


async def test_a_repair_over_the_wire_and_the_end(server: RpcServer, tmp_path: Path) -> None:
    async with joined(server, tmp_path, EnvironmentConfig()) as process:
        described = await ask(server, Describe())
        assert isinstance(described, DescribeReply)
        assert described.vocabulary_size == 32
        shown = await ask(server, Demonstrate(0, 0, 256))
        assert isinstance(shown, DemonstrateReply)
        assert len(shown.demonstrations) == 256
        opened = await ask(server, OpenEpisode(7, "evaluation", 3))
        assert isinstance(opened, OpenEpisodeReply)
        assert unpack(opened.ids).startswith("<task>")
        stepped = await ask(server, StepEpisode(7, 0, pack("TEST <end>"), False))
        assert isinstance(stepped, StepEpisodeReply)
        assert unpack(stepped.observation).startswith("<tool> fail")
        server.notify(PEER, CloseEpisode(7))
        gone = await ask(server, StepEpisode(7, 1, pack("TEST <end>"), False))
        assert isinstance(gone, EpisodeFailed)
        assert gone.kind == "gone"
        server.notify(PEER, Shutdown("test is over"))
        assert await ended(process) == 0


async def test_sigterm_ends_it(server: RpcServer, tmp_path: Path) -> None:
    async with joined(server, tmp_path, EnvironmentConfig()) as process:
        await ask(server, OpenEpisode(1, "train", 0))
        process.terminate()
        assert await ended(process) == 0


async def test_it_beats_while_environment_code_blocks_and_still_ends(
    server: RpcServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{Path(odd.__file__).parent}")
    settings = EnvironmentConfig(name="odd_environments:OddEnvironment")
    async with joined(server, tmp_path, settings) as process:
        await ask(server, OpenEpisode(1, "train", odd.BLOCKS))
        async with asyncio.TaskGroup() as group:
            step = StepEpisode(1, 0, np.array([8, odd.END], "<i4").tobytes(), False)
            asking = group.create_task(ask(server, step))
            await heard(server, _is_stuck)
            assert not asking.done()
            asking.cancel()
        server.notify(PEER, Shutdown("test is over"))
        assert await ended(process) == 0


def _is_stuck(message: Inbound) -> bool:
    return (
        isinstance(message, Notification)
        and isinstance(message.message, Heartbeat)
        and message.message.pending > 1
    )


async def test_a_wrong_environment_is_said_in_one_line(server: RpcServer, tmp_path: Path) -> None:
    settings = EnvironmentConfig(name="bugfix", options={"num_lines": 9})
    with worker(tmp_path, server.address, settings) as process:
        assert await ended(process) == 1
        assert process.stderr is not None
        said = process.stderr.read().strip().splitlines()
    assert said == ["pearl.envs.worker: environment.options.num_lines = 9: use 1 to 6"]


async def test_a_message_that_is_not_for_it_is_refused(server: RpcServer, tmp_path: Path) -> None:
    async with joined(server, tmp_path, EnvironmentConfig()):
        with pytest.raises(RemoteError):
            await ask(server, DescribeReply(1, (), 0, 0, 0, True))
        assert isinstance(await ask(server, Describe()), DescribeReply)
