"""``pearl run`` as a process, with the real node agent: wrong starts and signals end clearly and leave nothing."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from pearl.cli.run import OF_NO_RUN
from pearl.runtime import process_markers
from pearl.runtime.pidfd import wait_exited
from pearl.service import coordinator_process
from pearl.service.console import Console
from pearl.types.config import Config

PROGRAM = """
import sys
from pathlib import Path
from pearl.config import load
from pearl.service import coordinator_process
from pearl.service.processes import process_specs
process_specs.ENVIRONMENT_MODULE = sys.argv[1]
run_dir = Path(sys.argv[2])
run_dir.mkdir(exist_ok=True)
(run_dir / "job.toml").write_text("")
config = load(run_dir / "job.toml", sys.argv[3:])
sys.exit(coordinator_process.run(config, run_dir, resume=False))
"""
SLEEPER = """
import subprocess, time
script = "sleep 100 & echo $! > escaped.tmp; mv escaped.tmp escaped"
subprocess.run(["/bin/sh", "-c", script], env={}, start_new_session=True, check=True)
print("sleeping", flush=True)
time.sleep(60)
"""


@asynccontextmanager
async def start(
    run_dir: Path, environment_module: str, *overrides: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    (run_dir.parent / "sleeper.py").write_text(SLEEPER)
    paths = [str(run_dir.parent), *filter(None, sys.path)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, environment_module, str(run_dir), "model.device=cpu", *overrides),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=run_dir.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        async with asyncio.timeout(40):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def outcome(run_dir: Path, *words: str) -> tuple[int | None, str]:
    """Exit code and stderr."""
    async with start(run_dir, *words) as process:
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


def nothing_is_left(run_dir: Path) -> bool:
    return process_markers.find_marked((run_dir / "run_id").read_text().strip()) == []


async def test_an_environment_worker_that_cannot_start_is_said_with_its_log(tmp_path: Path) -> None:
    code, errors = await outcome(tmp_path / "run", "no_such_module")
    assert code == 1
    assert "error: environment worker 0 did not start" in errors
    assert "No module named no_such_module" in errors
    assert "logs/environment.0.1" in errors
    assert nothing_is_left(tmp_path / "run")


@pytest.mark.scenario("NW-01")
async def test_an_occupied_port_is_refused_with_the_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = f"runtime.address=tcp://127.0.0.1:{port}"
        code, errors = await outcome(tmp_path / "run", "sleeper", address)
    assert code == 2
    assert f"127.0.0.1:{port}" in errors
    assert "Traceback" not in errors


async def test_a_run_that_never_began_leaves_its_logs_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, errors = await outcome(run_dir, "no_such_module")
    assert code == 1
    assert "--resume" not in errors
    assert {path.name for path in run_dir.iterdir()} - OF_NO_RUN == {"job.toml"}


async def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    code, errors = await outcome(tmp_path / "run", "sleeper", "model.path=/no/such/model")
    assert code == 2
    assert "/no/such/model" in errors


async def _say_hello(process: asyncio.subprocess.Process, run_dir: Path) -> None:
    """Wait until the environment worker runs, which will never say hello."""
    assert process.stdout is not None
    while b"environment: starting" not in await process.stdout.readline():
        pass
    log = run_dir / "logs" / "environment.0.1" / "rank0.log"
    while not (log.exists() and "sleeping" in log.read_text()):  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # a file has no event; the test's own limit ends it


@pytest.mark.scenario("PL-01")
async def test_a_signal_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with start(run_dir, "sleeper") as process:
        await _say_hello(process, run_dir)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 143
        assert time.monotonic() - began < 15
    assert nothing_is_left(run_dir)


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize("numbers", [[INT] * 5, [TERM] * 5, [TERM, INT, INT]])
@pytest.mark.parametrize("event", ["run directory", "environment: starting", "stopped by signal"])
@pytest.mark.scenario("PL-01")
async def test_signals_in_a_row_end_it_with_the_code_of_the_first(
    tmp_path: Path, event: str, numbers: list[signal.Signals]
) -> None:
    """Of different signals that are pending at once the kernel delivers the lower number first."""
    run_dir = tmp_path / "run"
    is_handled = event.startswith("stopped")
    codes = {128 + number for number in (numbers[:1] if is_handled else numbers)}
    async with start(run_dir, "sleeper") as process:
        assert process.stdout is not None
        if is_handled:  # it is cleaning up
            await _say_hello(process, run_dir)
            process.send_signal(numbers[0])
        while event.encode() not in await process.stdout.readline():
            pass
        for number in numbers:
            process.send_signal(number)
        assert await process.wait() in codes
        assert process.stderr is not None
        assert await process.stderr.read() == b""
    assert nothing_is_left(run_dir)


@pytest.mark.parametrize(("number", "code"), [(INT, 130), (TERM, 143)])
@pytest.mark.scenario("PL-01")
async def test_signals_while_it_imports_end_it_with_their_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    words = ("-X", "importtime", "-m", "pearl", "run", "absent.toml", "--run-dir", str(tmp_path / "run"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stderr=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while b" argparse" not in await process.stderr.readline():
            pass
        for _ in range(5):
            process.send_signal(number)
        assert await process.wait() == code
        assert b"Traceback" not in await process.stderr.read()


async def test_a_run_may_listen_on_ipv6(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with start(run_dir, "sleeper", "runtime.address=tcp://[::1]:0") as process:
        await _say_hello(process, run_dir)  # the agent has joined by then, and started the environment
        process.terminate()
        assert await process.wait() == 143
    assert nothing_is_left(run_dir)


@pytest.mark.parametrize(
    "name", ["{coordinator}", "{directory} 'a' \"b\"", "%s %(message)s", "$HOME $$ ${x}", "a\nb"]
)
async def test_the_name_of_a_run_directory_is_no_template(tmp_path: Path, name: str) -> None:
    run_dir = tmp_path / name
    async with start(run_dir, "sleeper") as process:
        await _say_hello(process, run_dir)
        process.terminate()
        assert await process.wait() == 143
    assert nothing_is_left(run_dir)


@pytest.mark.scenario("PL-02")
async def test_kill_9_of_the_coordinator_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with start(run_dir, "sleeper") as process:
        await _say_hello(process, run_dir)
        run_id = (run_dir / "run_id").read_text().strip()
        with process_markers.open_pidfds(process_markers.find_marked(run_id)) as fds:
            process.kill()
            await process.wait()
            assert len(fds) >= 2
            assert await wait_exited(fds, limit_s=15)
    assert nothing_is_left(run_dir)


@pytest.mark.parametrize(
    "victim", ["coordinator", "agent", "environment", "all but the subreapers", "nobody"]
)
@pytest.mark.scenario("PL-02")
async def test_what_an_environment_started_in_a_session_of_its_own_ends_too(
    tmp_path: Path, victim: str
) -> None:
    """With an environment that is empty and a parent that is gone, only its descent tells whose it is."""
    run_dir = tmp_path / "run"
    async with start(run_dir, "sleeper") as process:
        await _say_hello(process, run_dir)
        escaped = psutil.Process(int((tmp_path / "escaped").read_text()))
        assert process_markers.RUN_VARIABLE not in escaped.environ()
        run_id = (run_dir / "run_id").read_text().strip()
        agent, environment = (
            process_markers.find_marked(run_id, name) for name in ("agent.0.1", "environment.0.1")
        )
        worker = [pid for pid in environment if psutil.Process(pid).ppid() in environment]
        victims = {
            "coordinator": [process.pid],
            "agent": agent,
            "environment": worker,
            "all but the subreapers": [process.pid, *agent, *worker],
            "nobody": [],
        }[victim]
        with process_markers.open_pidfds([escaped.pid, *process_markers.find_marked(run_id)]) as fds:
            for pid in victims:
                with suppress(ProcessLookupError):  # it may have ended with the one before
                    os.kill(pid, signal.SIGKILL)
            if not victims:
                process.terminate()
            assert await wait_exited(fds, limit_s=15)
        if process.pid not in victims:
            assert process.stdout is not None
            await process.stdout.read()
        await process.wait()
    assert nothing_is_left(run_dir)


def test_who_does_not_end_on_sigkill_changes_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(sys.stdout, 1)
    life = coordinator_process.Service(Config(), tmp_path, "run", console, resume=False, trace=())
    assert life._final_code(0, ()) == 0
    assert life._final_code(0, ("pid 7 (python, disk-sleep)",)) == 1
    assert "do not end on SIGKILL and hold what they have, GPUs too: pid 7 (python" in capsys.readouterr().err
    assert life._final_code(2, ("pid 7",)) == 2


async def test_the_death_of_the_node_agent_ends_the_run_with_its_name(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with start(run_dir, "sleeper") as process:
        await _say_hello(process, run_dir)
        run_id = (run_dir / "run_id").read_text().strip()
        for pid in process_markers.find_marked(run_id, "agent.0.1"):
            os.kill(pid, signal.SIGKILL)
        assert process.stderr is not None
        errors = (await process.stderr.read()).decode()
        assert await process.wait() == 1
    assert "error: the node agent ended with exit code -9" in errors
    assert nothing_is_left(run_dir)
