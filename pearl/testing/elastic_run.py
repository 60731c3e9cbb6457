"""What tests of elasticity do to a real run: give and take GPUs, let other hosts join, look at each worker's life."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from pearl.runtime import run_registry
from pearl.testing.live_run import ROOT, LiveRun

ELASTIC: dict[str, Any] = {
    "run__num_steps": 5000,  # as long as it takes, not as many steps: machines differ
    "environment__num_evaluation_tasks": 0,
    "elastic__borrow": "always",
    "elastic__inter": True,
    # Of a joiner; the default is that of real models, for which these steps are too short to earn it.
    "elastic__preparation_prior_s": 0.1,
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
Place = tuple[int, frozenset[tuple[Any, ...]]]
"""Of a worker: its pid, and its TCP connections."""


def pearl(*words: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pearl.cli", *words]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit_s, check=False
    )


def preempt(run: LiveRun, *words: str) -> None:
    result = pearl("preempt", *words, "--run-dir", str(run.run_dir))
    assert result.returncode == 0, result.stdout + result.stderr


class Workers:
    """The newest condition of each life of a slot, from the run's own metrics."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run

    def told(self, slot: int, incarnation: int) -> list[str]:
        lines = self._run.metrics("worker")
        return [line["event"] for line in lines if (line["slot"], line["incarnation"]) == (slot, incarnation)]

    def wait_for(self, slot: int, incarnation: int, event: str = "serving") -> None:
        what = f"slot {slot} in life {incarnation} to be {event}"
        self._run.wait_for(what, lambda: event in self.told(slot, incarnation))

    def has_served_again(self, slot: int) -> bool:
        """Whether it serves in a life after its first; one that is cut short may come between."""
        lines = self._run.metrics("worker")
        return any(
            line["slot"] == slot and line["incarnation"] > 1 and line["event"] == "serving" for line in lines
        )

    def place(self, slot: int) -> Place:
        """Return that of its present life; raises when it has none."""
        (process,) = self._run.ranks(f"rollout.{slot}.")
        links = process.net_connections(kind="tcp")
        return process.pid, frozenset(
            (link.laddr, link.raddr) for link in links if link.status == psutil.CONN_ESTABLISHED
        )


def is_lent(run: LiveRun) -> bool:
    told = run.metrics("training")
    return bool(told) and told[-1]["activity"] == "lent"


def address_of(run: LiveRun) -> str:
    def find() -> run_registry.LiveRun | None:
        return run_registry.find(run.run_dir)

    found: run_registry.LiveRun = run.wait_for("the coordinator's address", find)
    return found.address


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class FarHost:
    """A ``pearl agent`` on this machine that stands in for one of another host."""

    def __init__(self, address: str, name: str, output: Path, grace_s: float = 5.0) -> None:
        self.name = name
        self.output = output
        self._begin = output.stat().st_size if output.exists() else 0  # a former life's words end there
        words = [
            *("agent", "--coordinator", address, "--host", name, "--virtual-gpus", "1"),
            *("--grace", f"{grace_s:g}"),
        ]
        with output.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pearl.cli", *words],
                cwd=ROOT,
                stdout=stream,
                stderr=stream,
                env=ENVIRONMENT,
            )

    def text(self) -> str:
        return self.output.read_bytes()[self._begin :].decode(errors="replace")

    @property
    def has_joined(self) -> bool:
        return "joined run" in self.text()

    def leave(self, limit_s: float) -> int:
        """Leave as when its host is about to be taken away; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def far_host(run: LiveRun, name: str) -> Iterator[FarHost]:
    host = FarHost(address_of(run), name, run.run_dir.with_name(f"{name}.out"))
    try:
        yield host
    finally:
        if host.process.poll() is None:
            host.kill()
