"""A real ``pearl run`` in a process of its own, and what tests want to do to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from pearl.runtime import process_markers

ROOT = Path(__file__).parent.parent.parent
CHECK_LIMIT_S = 120.0
START_LIMIT_S = 180.0  # of a whole run on two busy cores
SMALL = {
    "run.num_steps": 4,
    "data.batch_size": 16,
    "data.group_size": 4,
    "environment.num_evaluation_tasks": 8,
    "rollout.num_workers": 2,
    "warm_start.num_steps": 5,
    "warm_start.batch_size": 8,
    "warm_start.warmup_steps": 2,
    "warm_start.num_demonstrations": 64,
    "training.learning_rate": 1e-3,
    "model.device": "cpu",
    "runtime.heartbeat_timeout_s": 8.0,
    "elastic.inter": False,
    "elastic.preemptible_gpus": 0,
    "elastic.trace": "",
    "elastic.borrow": "never",
}


PEARL = ("-m", "pearl.cli")


def check_counters(run_dir: Path) -> list[str]:
    """Return what ``tests/checker.py`` finds wrong with a run. It is run by itself: it shares nothing with PEARL."""
    command = [sys.executable, str(ROOT / "tests" / "checker.py"), str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_LIMIT_S, check=False)
    if done.returncode == 0:
        return []
    return (done.stdout + done.stderr).splitlines() or [f"the checker ended with code {done.returncode}"]


class LiveRun:
    def __init__(self, run_dir: Path, *words: str, program: Sequence[str] = PEARL) -> None:
        """``program`` does as ``pearl`` does; what it is told besides goes to its ``process.stdin``."""
        self.run_dir = run_dir
        self.output = run_dir.with_suffix(".out")
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, "run", *words, "--run-dir", str(run_dir)],
                cwd=ROOT,
                stdin=None if program == PEARL else subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        """The exit code; on a time-out everything is killed and the output shown."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {limit_s} s:\n{self.text()[-4000:]}") from None

    def wait_for(self, what: str, holds: Callable[[], Any], limit_s: float = START_LIMIT_S) -> Any:
        """Wait for a condition outside this process, of which nothing tells us."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = holds()
            if found:
                return found
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.text()[-4000:]}"
            time.sleep(0.02)
        raise AssertionError(f"{what} did not happen within {limit_s} s:\n{self.text()[-4000:]}")

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: len(self.steps()) > step)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run_dir / "metrics.jsonl") if line.get("kind") == kind]

    def steps(self) -> list[dict[str, Any]]:
        return self.metrics("step")

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    def run_id(self) -> str:
        return (self.run_dir / "run_id").read_text().strip()

    def processes(self, group: str = "") -> list[psutil.Process]:
        """All living processes of the run, or of the groups whose name begins with ``group``."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            mine = environment.get(process_markers.RUN_VARIABLE) == self.run_id()
            if mine and environment.get(process_markers.GROUP_VARIABLE, "").startswith(group):
                found.append(process)
        return found

    def ranks(self, group: str) -> list[psutil.Process]:
        """Return the worker processes of torchrun's groups: the children of the launcher below each group's subreaper.

        Forked ranks show neither their command line nor their environment, so it is by their place in the tree.
        """
        parents = {p.pid: p.ppid() for p in self.processes(group)}
        tops = {pid for pid, parent in parents.items() if parent not in parents}
        launchers = {pid for pid, parent in parents.items() if parent in tops}
        return [psutil.Process(pid) for pid, parent in parents.items() if parent in launchers]

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def assert_nothing_left(self, limit_s: float = 15.0) -> None:
        deadline = time.monotonic() + limit_s
        while left := self.processes():
            assert time.monotonic() < deadline, [p.cmdline()[:6] for p in left]
            time.sleep(0.05)

    def assert_stops(self, code: int, limit_s: float = 15.0) -> None:
        """After a signal or a failure: all its processes end within the limit, and nothing is left. The coordinator,
        alone by then, has the report to write, which takes its time on a busy machine."""
        deadline = time.monotonic() + limit_s
        while others := [p for p in self.processes() if p.pid != self.process.pid]:
            assert time.monotonic() < deadline, [p.cmdline()[:6] for p in others]
            time.sleep(0.05)
        assert self.wait(60) == code, self.text()
        self.assert_nothing_left(1.0)

    def assert_clean(self) -> dict[str, Any]:
        assert check_counters(self.run_dir) == []
        summary = self.summary()
        assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
        return summary


def environ(process: psutil.Process) -> dict[str, str]:
    try:
        found: dict[str, str] = process.environ()
    except psutil.Error:
        return {}
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def started(run_dir: Path, *words: str, **settings: Any) -> Iterator[LiveRun]:
    """A small job on the quickstart's settings, changed by ``settings`` (section__key = value)."""
    changed = {**SMALL, **{name.replace("__", "."): value for name, value in settings.items()}}
    pairs = [f"{name}={json.dumps(value)}" for name, value in changed.items()]
    run = LiveRun(run_dir, "launch/configs/quickstart.toml", *pairs, *words)
    with ended(run):
        yield run


@contextmanager
def resumed(run_dir: Path) -> Iterator[LiveRun]:
    run = LiveRun(run_dir, "--resume")
    with ended(run):
        yield run


@contextmanager
def ended(run: LiveRun) -> Iterator[None]:
    """End the run with all that it started, whatever happened in the test."""
    try:
        yield
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        if (run.run_dir / "run_id").exists():
            for process in run.processes():
                process.kill()
