"""Agents of hosts that may be taken away, against a real server: joining, notice, grace, losing the coordinator."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from member_watch import LIMIT_S, Members, watch_members

from pearl.cli import main
from pearl.runtime import coordinator_file, preemptible_agent, process_markers
from pearl.runtime.clock import MonotonicClock
from pearl.runtime.inbound import Call, Inbound, Notification, PeerJoined
from pearl.runtime.installation import installation, model_digest
from pearl.runtime.preemptible_agent import GivenUpError, JoinOptions, NoRunError, PreemptibleAgent
from pearl.runtime.rpc_server import RpcServer
from pearl.types.messages.control import (
    Ack,
    AgentReport,
    ControlMessage,
    Gpu,
    GpusReturned,
    GroupExited,
    Heartbeat,
    Leaving,
    Notice,
    Shutdown,
    StartGroup,
)

RUN_ID = f"test-{uuid4().hex}"
REPORT = AgentReport("a", (Gpu("a/0", 1, True), Gpu("a/1", 1, True)), 1, "spot")


class Coordinator:
    """Takes agents in, and keeps what they say."""

    def __init__(self, server: RpcServer) -> None:
        self.server = server
        self.agent = ""  # the newest
        self.objection = ""
        self.reports: list[AgentReport] = []
        self.on_report: Callable[[], None] = lambda: None
        self.told: list[Any] = []
        self.joined = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            self._take(await self.server.receive())
            self._changed.set()

    def _take(self, inbound: Inbound) -> None:
        match inbound:
            case PeerJoined(peer, _):
                self.agent = peer
            case Call(_, AgentReport() as report, reply, fail):
                assert [gpu.gpu for gpu in report.gpus] == ["a/0", "a/1"]
                self.reports.append(report)
                if self.objection:
                    fail(ValueError(self.objection))
                else:
                    self.on_report()
                    reply(Ack())
                    self.joined += 1
            case Notification(_, message) if not isinstance(message, Heartbeat):
                self.told.append(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def heard(self, kind: type[Any]) -> Any:
        await self.until(lambda: any(isinstance(one, kind) for one in self.told))
        return next(one for one in self.told if isinstance(one, kind))

    async def start(self, spec: StartGroup) -> None:
        await self.server.call(self.agent, spec, deadline_s=LIMIT_S)


@asynccontextmanager
async def attended(**settings: Any) -> AsyncIterator[Coordinator]:
    """A coordinator; what a failed test leaves ends with it."""
    server = RpcServer(
        "tcp://127.0.0.1:0",
        run_id=RUN_ID,
        messages=ControlMessage,
        queue_messages=256,
        max_frame_bytes=1 << 20,
        clock=MonotonicClock(),
        keepalive_period_s=0.05,
        **settings,
    )
    async with server, asyncio.TaskGroup() as group:
        coordinator = Coordinator(server)
        running = group.create_task(coordinator.run())
        try:
            yield coordinator
        finally:
            running.cancel()
            await process_markers.kill_run(RUN_ID)


@pytest.fixture
async def watch() -> AsyncIterator[Members]:
    async with watch_members() as watched:
        yield watched


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemptible_agent, "RETRY_S", 0.02)


def terms(address: str, **settings: Any) -> JoinOptions:
    defaults: dict[str, Any] = {
        "grace_s": LIMIT_S,
        "rejoin_s": LIMIT_S,
        "lease_s": LIMIT_S,
        "heartbeat_period_s": 0.05,
        "queue_messages": 256,
        "max_frame_bytes": 1 << 20,
    }
    return JoinOptions(address=address, **(defaults | settings))


@asynccontextmanager
async def joined(**settings: Any) -> AsyncIterator[tuple[Coordinator, PreemptibleAgent, asyncio.Task[str]]]:
    """An agent that was taken in; it must have left at the end of the block."""
    async with asyncio.timeout(2 * LIMIT_S), attended() as coordinator, asyncio.TaskGroup() as group:
        agent = PreemptibleAgent(terms(coordinator.server.address, **settings), REPORT)
        running = group.create_task(agent.run())
        await coordinator.until(lambda: coordinator.joined == 1)
        yield coordinator, agent, running


async def test_an_agent_finds_the_run_and_starts_what_it_is_given_in_a_place_of_its_own(
    tmp_path: Path,
) -> None:
    spec = StartGroup(
        "rollout.3.1",
        "echo_arguments",
        ("--address", "{coordinator}", "--config", "{directory}/config.json"),
        {"PYTHONPATH": str(Path(__file__).parent)},
        0,
        "/no/such/run/logs",
        files={"config.json": b"{}"},
    )
    async with joined(log_directory=tmp_path) as (coordinator, _, running):
        await coordinator.start(spec)
        exited = await coordinator.heard(GroupExited)
        assert exited.exit_code == 0, exited.log_tail
        here = tmp_path / "rollout.3.1"
        assert (here / "config.json").read_bytes() == b"{}"
        told = (here / "rank0.log").read_text().split()
        assert told == ["--address", coordinator.server.address, "--config", f"{here}/config.json"]
        coordinator.server.notify(coordinator.agent, Shutdown("done"))
        assert await running == "shutdown: done"


async def test_an_agent_reports_what_it_has_of_the_model_that_the_job_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with attended(model_path=str(tmp_path)) as coordinator, asyncio.TaskGroup() as group:
        running = group.create_task(PreemptibleAgent(terms(coordinator.server.address), REPORT).run())
        await coordinator.until(lambda: coordinator.joined == 1)
        assert coordinator.reports[0].model == model_digest(str(tmp_path))
        coordinator.server.notify(coordinator.agent, Shutdown("done"))
        await running


async def test_an_agent_with_other_sources_is_refused_with_both_values() -> None:
    here = installation()
    theirs = msgspec.structs.replace(here, sources="0123456789abcdef")
    async with attended(installation=theirs) as coordinator:
        with pytest.raises(GivenUpError, match=f"sources: {here.sources} there, 0123456789abcdef here"):
            await PreemptibleAgent(terms(coordinator.server.address), REPORT).run()


@pytest.mark.parametrize("is_shared", [True, False])
async def test_logs_go_to_the_run_directory_only_where_it_is_shared(
    tmp_path: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "run_id").write_text(f"{RUN_ID}\n" if is_shared else "another\n")
    async with joined() as (coordinator, _, running):
        environment = {"PYTHONPATH": str(Path(__file__).parent)}
        await coordinator.start(StartGroup("rollout.0.1", "echo_arguments", (), environment, 0, str(logs)))
        await coordinator.heard(GroupExited)
        coordinator.server.notify(coordinator.agent, Shutdown("done"))
        await running
    assert (logs / "rollout.0.1").is_dir() == is_shared
    assert len(list((tmp_path / "tmp").glob("pearl-a-*/rollout.0.1/rank0.log"))) == int(not is_shared)


async def test_a_notice_is_given_and_the_agent_leaves_when_its_gpus_are_back(
    watch: Members, tmp_path: Path
) -> None:
    async with joined(log_directory=tmp_path, grace_s=LIMIT_S) as (coordinator, agent, running):
        server, name = coordinator.server, coordinator.agent
        server.notify(name, GpusReturned(("a/0", "a/1")))  # before the notice: they may arrive again
        await coordinator.start(watch.spec("polite", tmp_path))
        await watch.up("polite")
        agent.call_off("SIGUSR1")
        assert await coordinator.heard(Notice) == Notice(LIMIT_S, "SIGUSR1")
        server.notify(name, GpusReturned(("a/0",)))
        assert watch.living() == {"polite"}  # until it is told to end them, or leaves
        server.notify(name, GpusReturned(("a/1",)))
        assert await running == "SIGUSR1: all GPUs were given back"
        assert (await coordinator.heard(Leaving)).reason == "SIGUSR1: all GPUs were given back"
        await watch.ended("polite")
        assert isinstance(coordinator.told[-1], Leaving)


@pytest.mark.scenario("PL-05")
async def test_the_end_of_the_grace_kills_what_is_left(watch: Members, tmp_path: Path) -> None:
    async with joined(log_directory=tmp_path, grace_s=0.2) as (coordinator, agent, running):
        await coordinator.start(watch.spec("stubborn", tmp_path))
        await watch.up("stubborn")
        agent.call_off("SIGTERM")
        assert await running == "SIGTERM: the grace of 0.2 s is over"
        await watch.ended("stubborn")


@pytest.mark.scenario("PL-05")
async def test_a_second_signal_leaves_at_once(watch: Members, tmp_path: Path) -> None:
    async with joined(log_directory=tmp_path) as (coordinator, agent, running):
        await coordinator.start(watch.spec("stubborn", tmp_path))
        await watch.up("stubborn")
        agent.call_off("SIGINT")
        agent.call_off("SIGINT")
        assert await running == "SIGINT"
        await watch.ended("stubborn")


async def test_an_agent_that_leaves_before_it_knows_that_it_was_taken_in_says_so() -> None:
    async with attended() as coordinator, asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        agent = PreemptibleAgent(terms(coordinator.server.address), REPORT)
        coordinator.on_report = lambda: agent.call_off("SIGTERM")
        assert await group.create_task(agent.run()) == "SIGTERM"
        assert (await coordinator.heard(Leaving)).reason == "SIGTERM"
        assert not any(isinstance(one, Notice) for one in coordinator.told)


async def test_the_end_of_its_lifetime_is_a_notice() -> None:
    async with joined(grace_s=0.1, lifetime_s=0.4) as (coordinator, _, running):
        assert await running == "end of its lifetime: the grace of 0.1 s is over"
        assert (await coordinator.heard(Notice)).grace_s == 0.1


async def test_an_agent_that_is_not_taken_in_gives_up_with_the_reason() -> None:
    async with attended() as coordinator:
        coordinator.objection = "elastic.inter = false: no"
        with pytest.raises(GivenUpError, match=r"^elastic\.inter = false: no$"):
            await PreemptibleAgent(terms(coordinator.server.address), REPORT).run()
        with pytest.raises(GivenUpError, match="it belongs to run 'other'"):
            await PreemptibleAgent(terms(coordinator.server.address, run_id="other"), REPORT).run()


@pytest.mark.scenario("PL-02")
async def test_a_lost_coordinator_ends_the_groups_and_is_joined_again(watch: Members, tmp_path: Path) -> None:
    async with joined(log_directory=tmp_path, lease_s=1.0) as (coordinator, _, running):
        await coordinator.start(watch.spec("polite", tmp_path))
        await watch.up("polite")
        first = coordinator.agent
        coordinator.server.faults.partition(first)
        await watch.ended("polite")
        await coordinator.until(lambda: coordinator.joined == 2)
        assert coordinator.agent == first.removesuffix("1") + "2"
        coordinator.server.drop(coordinator.agent, "it was silent")  # and once more, by a word of ours
        await coordinator.until(lambda: coordinator.joined == 3)
        coordinator.server.notify(coordinator.agent, Shutdown("done"))
        assert await running == "shutdown: done"


async def test_a_coordinator_that_does_not_come_back_is_given_up() -> None:
    address = "tcp://127.0.0.1:9"  # nobody listens on the discard port here
    with pytest.raises(NoRunError, match=r"no coordinator let it in at tcp://127\.0\.0\.1:9 for 0\.2 s"):
        await PreemptibleAgent(terms(address, rejoin_s=0.2, lease_s=0.2), REPORT).run()


async def test_a_signal_while_nobody_is_there_ends_it_as_asked() -> None:
    agent = PreemptibleAgent(terms("tcp://127.0.0.1:9"), REPORT)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        running = group.create_task(agent.run())
        await asyncio.sleep(0.05)
        agent.call_off("SIGTERM")
        assert await running == "SIGTERM"


@asynccontextmanager
async def command(coordinator: Coordinator, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``pearl agent`` as a process, killed at the end if it is still there."""
    address = coordinator.server.address.removeprefix("tcp://")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pearl.cli", "agent", "--coordinator", address, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.scenario("PL-05")
async def test_the_command_gives_notice_on_a_signal_and_exits_0() -> None:
    words = ("--host", "a", "--virtual-gpus", "2", "--grace", "7")
    async with attended() as coordinator, command(coordinator, *words) as process:
        assert process.stderr is not None
        while b"joined run" not in (line := await process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGUSR1)
        assert await coordinator.heard(Notice) == Notice(7.0, "SIGUSR1")
        coordinator.server.notify(coordinator.agent, GpusReturned(("a/0", "a/1")))
        output, log = await process.communicate()
    assert process.returncode == 0
    assert output == b"left: SIGUSR1: all GPUs were given back\n"
    assert log.count(b"SIGUSR1: giving the GPUs back") == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--coordinator", "nowhere"], '--coordinator "nowhere": is not HOST:PORT'),
        (["--coordinator", "udp://h:1"], '--coordinator "udp://h:1": is not HOST:PORT'),
        (["--coordinator", "h:0"], '--coordinator "h:0": is not HOST:PORT'),
        (
            ["--coordinator", "h:1", "--host", "local"],
            '--host "local": cannot be the name of a host that joins',
        ),
        (["--coordinator", "h:1", "--host", "a/b"], '--host "a/b": cannot be'),
        (["--coordinator", "h:1", "--virtual-gpus", "0"], "--virtual-gpus: 0: give a whole number from 1"),
        (["--coordinator", "h:1"], "this host has no GPU to offer; --virtual-gpus N offers virtual ones"),
    ],
)
def test_an_agent_that_is_started_wrongly_says_how(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["agent", *words]) == 2
    assert error in capsys.readouterr().err


def announce(run_dir: Path, coordinator: Coordinator) -> coordinator_file.CoordinatorFile:
    return coordinator_file.publish(run_dir, coordinator.server.address.removeprefix("tcp://"), RUN_ID)


async def test_an_agent_follows_its_run_by_the_file_and_leaves_when_it_is_over(tmp_path: Path) -> None:
    options = terms("", file=tmp_path / coordinator_file.NAME)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        running = group.create_task(PreemptibleAgent(options, REPORT).run())
        async with attended() as first:
            life = announce(tmp_path, first)
            await first.until(lambda: first.joined == 1)
            coordinator_file.close(tmp_path, life, "stopped")
            first.server.notify(first.agent, Shutdown("stopped by signal 15"))
        async with attended() as second:  # the run was resumed, at another address
            life = announce(tmp_path, second)
            assert life.incarnation == 2
            await second.until(lambda: second.joined == 1)
            coordinator_file.close(tmp_path, life, "over")
            second.server.notify(second.agent, Shutdown("the run is over"))
            assert await running == "the run is over"


async def test_an_address_at_which_nobody_answers_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemptible_agent, "FILE_TRY_S", 0.05)
    coordinator_file.publish(tmp_path, "127.0.0.1:9", RUN_ID)  # of a life that was killed
    options = terms("", file=tmp_path / coordinator_file.NAME)
    async with asyncio.timeout(LIMIT_S), attended() as coordinator, asyncio.TaskGroup() as group:
        agent = PreemptibleAgent(options, REPORT)
        running = group.create_task(agent.run())
        await asyncio.sleep(0.1)
        announce(tmp_path, coordinator)
        await coordinator.until(lambda: coordinator.joined == 1)
        coordinator.server.notify(coordinator.agent, GpusReturned(("a/0", "a/1")))
        agent.call_off("SIGTERM")
        agent.call_off("SIGTERM")
        assert await running == "SIGTERM"


@pytest.mark.parametrize("content", [None, b"{", b'{"address": 1}'])
async def test_a_file_that_names_no_run_is_given_up_in_time(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / coordinator_file.NAME
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NoRunError, match="for 0 s, last: the file names no live run"):
        await PreemptibleAgent(terms("", file=path, rejoin_s=0.0), REPORT).run()


def test_the_file_of_another_life_is_left_alone(tmp_path: Path) -> None:
    first = coordinator_file.publish(tmp_path, "[fd00::1]:7000", RUN_ID)
    second = coordinator_file.publish(tmp_path, "b:7001", RUN_ID)
    coordinator_file.close(tmp_path, first, "over")
    assert coordinator_file.read(tmp_path / coordinator_file.NAME) == second
    other = coordinator_file.publish(tmp_path, "b:7001", "another run")
    assert (second.incarnation, other.incarnation) == (2, 1)
    assert [path.name for path in tmp_path.iterdir()] == [coordinator_file.NAME]


def test_no_run_and_a_run_that_is_over_are_no_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["agent", "--coordinator", str(tmp_path), "--virtual-gpus", "1", "--host", "a", "--rejoin", "0"]
    assert main(words) == 0
    assert f"left: no coordinator let it in at {tmp_path}/coordinator.json" in capsys.readouterr().out
    life = coordinator_file.publish(tmp_path, "h:1", RUN_ID)
    coordinator_file.close(tmp_path, life, "over")
    assert main(words) == 0
    assert capsys.readouterr().out == "left: the run is over\n"
