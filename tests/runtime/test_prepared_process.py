"""Groups are forked from the host's prepared process and start without it when it is not there."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import uvloop
from member_watch import LIMIT_S, watch_members

from pearl.runtime import process_markers
from pearl.runtime.forked_child import ForkedChild
from pearl.runtime.prepared_process import MARKER_BYTES, PreparedProcess
from pearl.runtime.process_group import ProcessGroup
from pearl.workers import forked_main, process_server

LIMIT_OF_IMPORTS_S = 120.0


@asynccontextmanager
async def kept() -> AsyncIterator[tuple[PreparedProcess, str]]:
    """Keep a prepared process for a run of the test's own; nothing of it is left afterwards."""
    run_id = f"test-{uuid4().hex}"
    prepared = PreparedProcess()
    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(prepared.keep(run_id))
            prepared.want()
            yield prepared, run_id
            keeping.cancel()
        assert process_markers.find_marked(run_id) == []
    finally:
        await process_markers.kill_run(run_id)


async def server_up(prepared: PreparedProcess, *, other_than: int | None = None) -> int:
    async with asyncio.timeout(LIMIT_S):
        while prepared.pid in (None, other_than):  # noqa: ASYNC110  # no event of its own says so
            await asyncio.sleep(0.01)
    assert prepared.pid is not None
    return prepared.pid


def shares_memory(pid: int) -> bool:
    """Return whether most of what a process has in memory is shared with others."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    resident, private = (int(fields[name].split()[0]) for name in ("Rss", "Private_Dirty"))
    return private < resident / 5


@pytest.mark.timeout(300)
def test_whichever_process_dies_nothing_is_left_and_the_next_group_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs as agents do: uvloop gives children sockets where asyncio gives them pipes."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    uvloop.run(kill_each(tmp_path))


async def kill_each(tmp_path: Path) -> None:
    async with kept() as (prepared, run_id):
        server = await server_up(prepared)
        for victim in ("rank", "launcher", "subreaper", "server", "nobody"):
            async with watch_members() as members:
                spec = members.spec("rank", tmp_path, group=victim, num_processes=2, may_fork=True)
                spec.environment["PYTHONPATH"] = prepared_path(prepared)
                group = ProcessGroup(spec, run_id, prepared)
                await group.start()
                assert isinstance(group._process, ForkedChild), victim
                assert psutil.Process(group.pid).ppid() == os.getpid(), "its life is tied to the agent's"
                await members.up("rank0", "rank1", limit_s=LIMIT_OF_IMPORTS_S)
                (launcher,) = psutil.Process(group.pid).children()
                ranks = {members.pids[name] for name in ("rank0", "rank1")}
                assert {child.pid for child in launcher.children()} == ranks
                assert set(process_markers.find_marked(run_id, victim)) == {group.pid, launcher.pid, *ranks}
                assert all(map(shares_memory, ranks))
                match victim:
                    case "rank":
                        os.kill(members.pids["rank1"], signal.SIGKILL)
                    case "launcher":
                        launcher.kill()
                    case "subreaper":
                        psutil.Process(group.pid).kill()
                    case "server":
                        os.kill(server, signal.SIGKILL)
                        server = await server_up(prepared, other_than=server)
                        assert members.living() == {"rank0", "rank1"}
                        await group.stop(LIMIT_S)
                    case _:
                        await group.stop(LIMIT_S)
                async with asyncio.timeout(LIMIT_S):
                    exit_ = await group.wait()
                await members.ended("rank0", "rank1")
                expected = {"rank": 1, "launcher": -signal.SIGKILL, "subreaper": -signal.SIGKILL}
                assert exit_.code == expected.get(victim, exit_.code)
                assert process_markers.find_marked(run_id, victim) == []
        too_long = await prepared.fork("g" * MARKER_BYTES, (), {}, tmp_path / "log")
        threads = prepared._environment | {"OMP_NUM_THREADS": "7"}
        differing = await prepared.fork("group", (), threads, tmp_path / "log")
        assert (too_long, differing) == (None, None)


def prepared_path(prepared: PreparedProcess) -> str:
    return prepared._environment["PYTHONPATH"]


async def test_a_server_that_is_killed_while_it_imports_leaves_groups_to_the_usual_way(
    tmp_path: Path,
) -> None:
    async with kept() as (prepared, run_id):
        server = await server_up(prepared)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            forking = tasks.create_task(prepared.fork("g", (), prepared._environment, tmp_path / "log"))
            await asyncio.sleep(0)
            os.kill(server, signal.SIGKILL)
        assert forking.result() is None
        assert await server_up(prepared, other_than=server)
        assert process_markers.find_marked(run_id, "g") == []


async def test_one_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    prepared = PreparedProcess()
    prepared.want()
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(prepared.keep("run"))
        killed: set[int] = set()
        while not keeping.done():
            if prepared.pid is not None and prepared.pid not in killed:
                killed.add(prepared.pid)
                with suppress(ProcessLookupError):
                    os.kill(prepared.pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
    assert len(killed) == 5
    assert await prepared.fork("g", (), {}, tmp_path / "log") is None


def test_threads_after_the_imports_are_a_reason_not_to_fork() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert "threads" in process_server._problem(())
    finally:
        release.set()
        thread.join()


def test_a_socket_that_it_was_not_given_is_a_reason_not_to_fork() -> None:
    ours, other = socket.socketpair()
    with ours, other:
        links = [os.readlink(f"/proc/self/fd/{one.fileno()}") for one in (ours, other)]
        before = process_server.unsafe_files(links)
        assert set(process_server.unsafe_files(())) - set(before) == set(links)


def fail() -> None:
    raise RuntimeError("broken")


def die() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def leave_with(code: object) -> Callable[[], None]:
    def leave() -> None:
        raise SystemExit(code)

    return leave


@pytest.mark.parametrize(
    ("main", "code"),
    [
        (lambda: None, 0),
        (leave_with(None), 0),
        (leave_with(7), 7),
        (leave_with("in words"), 1),
        (fail, 1),
        (die, -signal.SIGTERM),
    ],
)
def test_a_forked_main_ends_as_a_program_does(main: Callable[[], None], code: int) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    pid = os.fork()
    if pid == 0:
        os.closerange(0, 3)
        forked_main.reset_signals()
        forked_main.end_after(main)
    signal.signal(signal.SIGTERM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
