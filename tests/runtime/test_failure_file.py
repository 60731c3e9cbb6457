"""The first error of a process group outlives it."""

import asyncio
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from pearl.runtime import failure_file, process_markers
from pearl.runtime.errors import FinalError
from pearl.runtime.failure_file import Failure
from pearl.runtime.process_group import Exit, ProcessGroup
from pearl.types.messages.control import StartGroup

LIMIT_S = 30.0


@pytest.fixture
async def run_id() -> AsyncIterator[str]:
    unique = f"test-{uuid4().hex}"
    yield unique
    await process_markers.kill_run(unique)


async def exit_of(source: str, run_id: str, tmp_path: Path) -> Exit:
    """Of a plain process that runs ``source``."""
    (tmp_path / "failing_module.py").write_text(textwrap.dedent(source))
    spec = StartGroup(
        group="group.0.1",
        module="failing_module",
        arguments=(),
        num_processes=0,
        log_directory=str(tmp_path / "logs"),
        environment={"PYTHONPATH": str(tmp_path)},
    )
    group = ProcessGroup(spec, run_id)
    await group.start()
    async with asyncio.timeout(LIMIT_S):
        return await group.wait()


async def test_the_first_error_is_kept_not_the_last_line(run_id: str, tmp_path: Path) -> None:
    source = """
    import atexit
    atexit.register(lambda: print("Error: something that followed from it"))
    raise KeyError("the cause")
    """
    exit_ = await exit_of(source, run_id, tmp_path)
    assert exit_.log_tail.endswith("something that followed from it")
    assert exit_.failure == Failure("KeyError: 'the cause'", is_final=False)


async def test_what_no_later_try_can_do_is_final(run_id: str, tmp_path: Path) -> None:
    source = """
    from pearl.runtime.errors import FinalError
    raise ExceptionGroup("tasks", [FinalError("no such model"), ValueError("later")])
    """
    exit_ = await exit_of(source, run_id, tmp_path)
    assert exit_.failure == Failure("no such model", is_final=True)


async def test_a_failure_of_an_earlier_life_is_not_taken_for_this_one(run_id: str, tmp_path: Path) -> None:
    (tmp_path / "logs" / "group.0.1").mkdir(parents=True)
    (tmp_path / "logs" / "group.0.1" / failure_file.NAME).write_text('{"reason":"old","is_final":true}')
    exit_ = await exit_of("raise SystemExit(3)", run_id, tmp_path)
    assert (exit_.code, exit_.failure) == (3, None)


def test_only_the_first_of_a_group_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure_file.ENVIRONMENT_KEY, str(tmp_path / "failure.json"))
    failure_file.write(FinalError("first"))
    failure_file.write(ValueError("then"))
    assert failure_file.read(tmp_path / "failure.json") == Failure("first", is_final=True)
    (tmp_path / "failure.json").write_text("half a li")
    assert failure_file.read(tmp_path / "failure.json") is None


def test_an_error_with_an_unpaired_surrogate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure_file.ENVIRONMENT_KEY, str(tmp_path / "failure.json"))
    failure_file.write(ValueError("odd \udc80 text"))
    assert failure_file.read(tmp_path / "failure.json") == Failure("ValueError: odd ? text", is_final=False)
