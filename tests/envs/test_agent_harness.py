"""An agent that is a program: real processes behind the environment worker's service, and nothing left of them."""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import harness_scores
import psutil
import pytest
from agent_bench import END, AgentBench, agent_bench

from pearl.envs.agents import harness
from pearl.envs.loader import load_environment
from pearl.envs.sandbox import keeper
from pearl.types.messages.environment import EpisodeFailed, StepEpisodeReply

PROGRAM = Path(__file__).with_name("harness_program.py")
GOOD, SILENT, EDITS, WAITS, MANY, STUBBORN, REPEATS = range(7)
OPTIONS: dict[str, Any] = {
    "command": shlex.join([sys.executable, str(PROGRAM)]),
    "score": "harness_scores:score",
}


@asynccontextmanager
async def running(directory: Path, **options: str) -> AsyncIterator[AgentBench]:
    harness_scores.RUNS.clear()
    with agent_bench(directory, "harness", OPTIONS | options) as bench:
        try:
            yield bench
        finally:
            await bench.service.stop()


async def test_a_program_from_its_first_call_to_its_score(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        assert "Guess: good." in await bench.open(GOOD)
        reply = await bench.say("42" + END)
        assert isinstance(reply, StepEpisodeReply), reply
        assert (reply.observation, reply.reward, reply.done) == (b"", 1.0, True)
        [run] = harness_scores.RUNS
        assert (run.exit_code, run.output, run.truncated) == (0, "done", False)
        assert [message["content"] for message in run.messages] == ["Guess: good.", "42"]
        assert not run.directory.exists()


async def test_a_plain_scoring_function_will_do(tmp_path: Path) -> None:
    async with running(tmp_path, score="harness_scores:plain_score") as bench:
        await bench.open(GOOD)
        reply = await bench.say("42" + END)
        assert isinstance(reply, StepEpisodeReply)
        assert reply.reward == 0.5


async def test_one_that_never_calls_is_a_failure_with_what_it_wrote(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        failure = await bench.open(SILENT)
        assert "exit code 1 without a call of the model: nothing to do" in failure


async def test_one_that_fails_over_an_edited_history_is_no_sample(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.open(EDITS)
        failed = await bench.say("42" + END)
        assert isinstance(failed, EpisodeFailed)
        assert "after a call that could not be answered (messages[0] is not what it was" in failed.reason


async def test_one_that_repeats_an_edited_history_for_ever_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "HALTED_GRACE_S", 0.2)
    async with running(tmp_path) as bench:
        await bench.open(REPEATS)
        failed = await bench.say("42" + END)
        assert isinstance(failed, EpisodeFailed)
        assert (failed.kind, "after a call that could not be answered" in failed.reason) == ("error", True)


@pytest.mark.parametrize("task", [MANY, STUBBORN])
async def test_out_of_turns_is_scored_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: int
) -> None:
    monkeypatch.setattr(harness, "HALTED_GRACE_S", 20.0 if task == MANY else 0.3)
    async with running(tmp_path) as bench:
        await bench.open(task)
        last = await bench.play(["no" + END] * 4)
        assert isinstance(last, StepEpisodeReply), last
        assert (last.reward, last.done) == (0.25, False)
        [run] = harness_scores.RUNS
        assert run.truncated
        assert run.exit_code == (3 if task == MANY else 128 + signal.SIGTERM)
        assert '"code": "turn_limit_exceeded"' in run.output


async def test_closing_ends_the_program_and_its_directory(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.open(WAITS)
        program = psutil.Process().children(recursive=True)
        assert len(program) == 2  # the keeper and the program
        await bench.close()
        await bench.open(GOOD, trajectory=2)  # after it: closing was posted before
        await bench.say("42" + END, trajectory=2)
    assert not any(process.is_running() for process in program)


async def test_what_left_its_parent_session_and_environment_ends_with_the_program(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"kind": "escapes", "path": str(path)}) + "\n")
    async with running(tmp_path / "model", tasks=str(tasks)) as bench:
        await bench.open(0)
        reply = await bench.say("42" + END)
        assert isinstance(reply, StepEpisodeReply)
        assert reply.done
        assert not lives(int(path.read_text()))


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_kill_9_of_the_worker_leaves_nothing(tmp_path: Path) -> None:
    """The worker's stand-in starts a keeper as the worker does, and is killed."""
    path = tmp_path / "pid"
    directory = tmp_path / "directory"
    directory.mkdir()
    escape = f"import os; os.setsid(); open({str(path)!r}, 'w').write(str(os.getpid())); import time; time.sleep(600)"
    start = f"[sys.executable, '-I', '-S', {keeper.__file__!r}, str(os.getpid()), {str(directory)!r}]"
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([*{start}, sys.executable, '-c', {escape!r}], env={{}}); "
        "print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not (path.exists() and path.read_text()):
            time.sleep(0.01)
        escaped = os.pidfd_open(int(path.read_text()))
        process.kill()
        readable, _, _ = select.select([escaped], [], [], 20.0)  # once it has ended
        os.close(escaped)
        assert readable
    while directory.exists():  # it is removed after that
        time.sleep(0.01)


def test_a_command_that_is_missing_and_the_code_of_one_that_is_killed() -> None:
    start = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), ""]
    missing = subprocess.run([*start, "no-such-program"], capture_output=True, check=False)
    assert (missing.returncode, missing.stderr) == (127, b"no-such-program: No such file or directory\n")
    killed = subprocess.run([*start, "sh", "-c", "kill -9 $$"], check=False)
    assert killed.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"command": ""}, "environment.options.command: is missing"),
        ({"command": "'"}, 'environment.options.command = "\'": No closing quotation'),
        ({"command": "no-such-program -x"}, "there is no program no-such-program on PATH"),
        ({"score": ""}, "environment.options.score: is missing"),
        ({"score": "no_such_module:f"}, "cannot be imported"),
        ({"score": "harness_scores:other"}, 'environment.options.score = "harness_scores:other"'),
        ({"size": 3}, "environment.options.size: is unknown; a harness takes command, score, tasks"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, str], wrong: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the text is compared below
        load_environment("harness", OPTIONS | options, str(tmp_path))
    assert wrong in str(refused.value)
