"""The registry names the living only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.runtime import run_registry


@pytest.fixture(autouse=True)
def private_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pearl"


def test_live_runs_are_found_newest_first_and_by_their_directory(tmp_path: Path) -> None:
    assert run_registry.live_runs() == []
    first = run_registry.register(tmp_path / "a", "tcp://127.0.0.1:1", "run-a", os.getpid())
    second = run_registry.register(tmp_path / "b", "tcp://127.0.0.1:2", "run-b", os.getpid())
    assert run_registry.live_runs() == [second, first]
    assert run_registry.find(tmp_path / "x" / ".." / "a") == first
    run_registry.unregister(second)
    assert run_registry.live_runs() == [first]
    assert run_registry.find(tmp_path / "b") is None


def test_entries_of_the_dead_and_of_reused_pids_are_removed(tmp_path: Path, private_registry: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        run = run_registry.register(tmp_path / "a", "tcp://127.0.0.1:1", "run-a", child.pid)
        assert run_registry.live_runs() == [run]
        child.kill()
    assert run_registry.live_runs() == []
    reused = run_registry.register(tmp_path / "b", "tcp://127.0.0.1:1", "run-b", os.getpid())
    path = private_registry / "run-b.json"
    path.write_bytes(path.read_bytes().replace(str(reused.process_start).encode(), b"1"))
    assert run_registry.live_runs() == []
    assert list(private_registry.iterdir()) == []


def test_an_earlier_life_does_not_take_back_the_entry_of_a_later_one(tmp_path: Path) -> None:
    first = run_registry.register(tmp_path, "tcp://127.0.0.1:1", "run", os.getpid())
    second = run_registry.register(tmp_path, "tcp://127.0.0.1:2", "run", os.getpid())
    run_registry.unregister(first)
    assert run_registry.live_runs() == [second]


def test_a_directory_that_others_can_write_to_is_refused(private_registry: Path) -> None:
    private_registry.mkdir()
    private_registry.chmod(0o770)
    with pytest.raises(ValueError, match="private directory of yours"):
        run_registry.live_runs()


def test_strangers_in_the_registry_are_dropped(private_registry: Path) -> None:
    private_registry.mkdir(mode=0o700)
    (private_registry / "x.json").write_text("{}")
    assert run_registry.live_runs() == []
