"""What asks before anything starts leaves nothing behind, however it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pearl.cli.probes import probe
from pearl.runtime.process_markers import is_living

STUCK = """
import os, subprocess, time
subprocess.run(["/bin/sh", "-c", "sleep 100 & echo $! > escaped"], env={}, start_new_session=True, check=True)
os.rename("escaped", "ready")
time.sleep(100)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "probe_for_test.py").write_text(
        "import sys; print(sys.stdin.read(), sys.argv[1:]); sys.exit(3)"
    )
    (tmp_path / "stuck_probe.py").write_text(STUCK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return "probe_for_test"


def test_a_probe_gets_its_question_and_gives_its_answer_and_code(module: str) -> None:
    done = probe(module, ["a b", "$c"], limit_s=30, question=b"why?")
    assert (done.returncode, done.stdout) == (3, b"why? ['a b', '$c']\n")


def test_a_probe_ends_with_who_asks(module: str, tmp_path: Path) -> None:
    code = "from pearl.cli.probes import probe; probe('stuck_probe', limit_s=60)"
    asking = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a file has no event
    escaped = psutil.Process(int((tmp_path / "ready").read_text()))
    others = [*psutil.Process(asking.pid).children(recursive=True), escaped]
    asking.kill()
    asking.wait()
    psutil.wait_procs(others, timeout=30)
    assert [process for process in others if is_living(process)] == []
