"""Node agents as real processes against a real server."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
import psutil
import pytest
from member_watch import LIMIT_S, Members, watch_members

from pearl.runtime import process_markers
from pearl.runtime.clock import MonotonicClock
from pearl.runtime.errors import RemoteError
from pearl.runtime.inbound import Notification, PeerJoined
from pearl.runtime.process_group import ProcessGroup
from pearl.runtime.rpc_server import RpcServer
from pearl.types.messages.control import (
    AgentReport,
    ControlMessage,
    Gpu,
    GroupExited,
    Shutdown,
    StartGroup,
    StartGroupReply,
    StopGroup,
    StopGroupReply,
)

RUN_ID = f"test-{uuid4().hex}"
AGENT = "agent.0.1"
Message = TypeVar("Message")


@pytest.fixture
async def watch() -> AsyncIterator[Members]:
    async with watch_members() as watched:
        yield watched


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    """What a failed test leaves ends with its server."""
    server = RpcServer(
        "tcp://127.0.0.1:0",
        run_id=RUN_ID,
        messages=ControlMessage,
        queue_messages=256,
        max_frame_bytes=1 << 20,
        clock=MonotonicClock(),
    )
    async with server:
        yield server
    await process_markers.kill_run(RUN_ID)


def agent_spec(
    server: RpcServer, directory: Path, *, slot: int = 0, incarnation: int = 1, lease_s: float = LIMIT_S
) -> StartGroup:
    options = {
        "address": server.address,
        "run-id": RUN_ID,
        "slot": slot,
        "incarnation": incarnation,
        "host": f"node{slot}",
        "virtual-gpus": 2,
        "virtual-gpu-bytes": 7,
        "lease-s": lease_s,
    }
    arguments = tuple(f"--{name}={value}" for name, value in options.items())
    return StartGroup(f"agent.{slot}.{incarnation}", "pearl.runtime.agent", arguments, {}, 0, str(directory))


async def start_agent(server: RpcServer, spec: StartGroup) -> ProcessGroup:
    """Up, connected, and its report heard."""
    agent = ProcessGroup(spec, RUN_ID)
    await agent.start()
    await heard(server, AgentReport, lambda _: True, spec.group)
    return agent


async def heard(
    server: RpcServer, kind: type[Message], matches: Callable[[Message], bool], peer: str = AGENT
) -> Message:
    """The next matching message from ``peer``; the others are passed over."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            inbound = await server.receive()
            if (
                not isinstance(inbound, Notification)
                or inbound.peer != peer
                or not isinstance(inbound.message, kind)
            ):
                continue
            if matches(inbound.message):
                return inbound.message


async def end_of(server: RpcServer, group: str, peer: str = AGENT) -> GroupExited:
    return await heard(server, GroupExited, lambda told: told.group == group, peer)


async def left(agent: ProcessGroup) -> int | None:
    async with asyncio.timeout(LIMIT_S):
        return (await agent.wait()).code


async def ask_start(server: RpcServer, spec: StartGroup, peer: str = AGENT) -> int:
    reply: StartGroupReply = await server.call(peer, spec, deadline_s=LIMIT_S, reply_type=StartGroupReply)
    return reply.pid


async def test_an_agent_reports_its_host_and_starts_and_stops_groups(
    server: RpcServer, watch: Members, tmp_path: Path
) -> None:
    agent = ProcessGroup(agent_spec(server, tmp_path), RUN_ID)
    await agent.start()
    async with asyncio.timeout(LIMIT_S):
        joined = await server.receive()
    assert isinstance(joined, PeerJoined)
    assert agent.pid is not None
    assert (joined.peer, joined.hello.host) == (AGENT, "node0")
    assert psutil.Process(joined.hello.pid).ppid() == agent.pid
    report = await heard(server, AgentReport, lambda _: True)
    assert report.gpus == (Gpu("node0/0", 7, True), Gpu("node0/1", 7, True))
    assert report.memory_bytes > 0

    pid = await ask_start(server, watch.spec("polite", tmp_path))
    await watch.up("polite")
    assert psutil.Process(watch.pids["polite"]).ppid() == pid
    with pytest.raises(RemoteError, match=r"group\.0\.1 runs here already"):
        await ask_start(server, watch.spec("polite", tmp_path))
    stopped = await server.call(AGENT, StopGroup("group.0.1", LIMIT_S), deadline_s=LIMIT_S)
    assert stopped == StopGroupReply("group.0.1", 0)
    assert (await end_of(server, "group.0.1")).reason == "stopped as asked"

    server.notify(AGENT, Shutdown("done"))
    assert await left(agent) == 0


async def test_a_group_that_fails_is_told_with_its_log_and_hurts_no_other(
    server: RpcServer, watch: Members, tmp_path: Path
) -> None:
    agent = await start_agent(server, agent_spec(server, tmp_path))
    await ask_start(server, watch.spec("sleep", tmp_path))
    await ask_start(server, watch.spec("exit", tmp_path, group="group.1.1"))
    told = await end_of(server, "group.1.1")
    assert (told.exit_code, told.reason) == (3, "exited with code 3")
    assert "about to fail" in told.log_tail
    await watch.up("sleep")
    assert watch.living() == {"sleep"}
    await agent.stop(LIMIT_S)


async def test_what_cannot_be_done_is_answered_and_the_agent_goes_on(
    server: RpcServer, watch: Members, tmp_path: Path
) -> None:
    agent = await start_agent(server, agent_spec(server, tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(RemoteError, match="NotADirectoryError"):
        await ask_start(server, watch.spec("sleep", tmp_path / "file"))
    with pytest.raises(RemoteError, match="group name"):
        await ask_start(server, watch.spec("sleep", tmp_path, group="../x"))
    stopped = await server.call(AGENT, StopGroup("group.9.9", 0), deadline_s=LIMIT_S)
    assert stopped == StopGroupReply("group.9.9", None)
    assert (await end_of(server, "group.9.9")).exit_code is None
    await ask_start(server, watch.spec("sleep", tmp_path))
    await watch.up("sleep")
    await agent.stop(LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.scenario("PL-05")
async def test_a_signal_ends_all_groups_tells_so_and_is_logged(
    server: RpcServer, watch: Members, tmp_path: Path, number: signal.Signals
) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, and so it is by the agent")
    agent = await start_agent(server, agent_spec(server, tmp_path))
    await ask_start(server, watch.spec("daemon", tmp_path))
    await watch.up("daemon")
    assert agent.pid is not None
    os.kill(agent.pid, number)
    assert (await end_of(server, "group.0.1")).reason == f"the node agent left: {number.name}"
    await watch.ended("daemon")
    assert await left(agent) == 0
    log = (tmp_path / AGENT / "rank0.log").read_text()
    assert log.count(f"{number.name}: ending all groups") == 1


@pytest.mark.scenario("PL-05")
async def test_a_signal_without_a_meaning_changes_nothing(
    server: RpcServer, watch: Members, tmp_path: Path
) -> None:
    agent = await start_agent(server, agent_spec(server, tmp_path))
    assert agent.pid is not None
    os.kill(agent.pid, signal.SIGUSR2)
    await ask_start(server, watch.spec("sleep", tmp_path))
    await watch.up("sleep")
    await agent.stop(LIMIT_S)
    await watch.ended("sleep")


@pytest.mark.scenario("PL-02")
async def test_kill_9_of_the_agent_ends_its_groups(server: RpcServer, watch: Members, tmp_path: Path) -> None:
    agent = await start_agent(server, agent_spec(server, tmp_path))
    await ask_start(server, watch.spec("stubborn", tmp_path))
    await watch.up("stubborn")
    assert agent.pid is not None
    os.kill(agent.pid, signal.SIGKILL)
    await watch.ended("stubborn")
    assert await left(agent) == -signal.SIGKILL


@pytest.mark.scenario("PL-02")
async def test_a_silent_coordinator_ends_agent_and_groups_at_the_end_of_the_lease(
    server: RpcServer, watch: Members, tmp_path: Path
) -> None:
    agent = await start_agent(server, agent_spec(server, tmp_path, lease_s=1.5))
    await ask_start(server, watch.spec("daemon", tmp_path))
    await watch.up("daemon")
    server.faults.partition(AGENT)
    await watch.ended("daemon")
    assert await left(agent) == 0
    assert "lease lost" in (tmp_path / AGENT / "rank0.log").read_text()


@pytest.mark.scenario("PL-02")
async def test_kill_9_of_whoever_started_the_agent_ends_everything(
    server: RpcServer, watch: Members, tmp_path: Path
) -> None:
    arguments = (msgspec.json.encode(agent_spec(server, tmp_path)).decode(), RUN_ID)
    launcher = ProcessGroup(
        watch.spec("", tmp_path, group="launcher", module="lone_launcher", arguments=arguments), RUN_ID
    )
    await launcher.start()
    await heard(server, AgentReport, lambda _: True)
    await ask_start(server, watch.spec("daemon", tmp_path))
    await watch.up("daemon")
    assert launcher.pid is not None
    os.kill(launcher.pid, signal.SIGKILL)
    await watch.ended("daemon")
    await left(launcher)


@pytest.mark.scenario("MB-02")
async def test_sigterm_of_one_agent_leaves_the_others_alone_and_a_new_one_may_join(
    server: RpcServer, watch: Members, tmp_path: Path
) -> None:
    staying = await start_agent(server, agent_spec(server, tmp_path))
    leaving = await start_agent(server, agent_spec(server, tmp_path, slot=1))
    pid = await ask_start(server, watch.spec("sleep", tmp_path))
    await ask_start(server, watch.spec("polite", tmp_path, group="group.1.1"), "agent.1.1")
    await watch.up("sleep", "polite")
    assert leaving.pid is not None
    os.kill(leaving.pid, signal.SIGTERM)
    await watch.ended("polite")
    assert await left(leaving) == 0
    server.drop("agent.1.1", "it left")
    successor = await start_agent(server, agent_spec(server, tmp_path, slot=1, incarnation=2))
    await ask_start(server, watch.spec("stubborn", tmp_path, group="group.1.2"), "agent.1.2")
    await watch.up("stubborn")
    assert watch.living() == {"sleep", "stubborn"}
    assert process_markers.process_start(pid) is not None
    for agent in (staying, successor):
        await agent.stop(0)


@pytest.mark.scenario("LA-05")
def test_an_agent_refuses_gpus_that_are_not_there() -> None:
    command = [sys.executable, "-m", "pearl.runtime.agent", "--address=tcp://127.0.0.1:1", "--run-id=x"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "GPU-nosuch"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("pearl.runtime.agent: CUDA_VISIBLE_DEVICES='GPU-nosuch': ")


def test_an_agent_does_without_torch() -> None:
    code = "import sys, pearl.runtime.agent; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=True)
