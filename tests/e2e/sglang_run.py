"""Real jobs with SGLang engines, and what is left of them when they are over."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import sglang_support

from pearl.testing.elastic_run import Workers
from pearl.testing.live_run import LiveRun, ended

CONFIG = "launch/configs/sglang-cpu.toml"
GONE_S = 15.0
LISTENS = "0A"
"""State in /proc/net/tcp."""
LIMIT_S = 400.0
"""Of whatever needs a server or two to start, on two busy cores."""


@contextmanager
def sglang_job(run_dir: Path, **settings: Any) -> Iterator[LiveRun]:
    """The shipped job, changed by ``settings`` (section__key = value)."""
    changed = {"sglang.python": sglang_support.python()} | {
        name.replace("__", "."): value for name, value in settings.items()
    }
    run = LiveRun(run_dir, CONFIG, *[f"{name}={json.dumps(value)}" for name, value in changed.items()])
    with ended(run):
        yield run


def wait_for_step(run: LiveRun, step: int) -> None:
    run.wait_for(f"step {step}", lambda: len(run.steps()) > step, LIMIT_S)


def wait_for_serving(run: LiveRun, slot: int, incarnation: int) -> None:
    def is_serving() -> bool:
        return "serving" in Workers(run).told(slot, incarnation)

    run.wait_for(f"slot {slot} in life {incarnation} to serve", is_serving, LIMIT_S)


def servers(run: LiveRun, slot: int) -> list[psutil.Process]:
    """SGLang's of the slot's present worker: its own first, then the scheduler's and others."""
    found: list[psutil.Process] = []
    for worker in run.ranks(f"rollout.{slot}."):
        with suppress(psutil.Error):
            for child in worker.children():
                found += [child, *child.children(recursive=True)]
    return found


def resident_bytes(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


@dataclass
class Belongings:
    """What processes hold that could be there after their end."""

    processes: list[psutil.Process]
    sockets: set[str]
    """Those that listen, by their number in the kernel: a port may be another's a moment later."""
    shared_memory: set[str]

    @classmethod
    def of(cls, processes: list[psutil.Process]) -> "Belongings":
        sockets, files = set(), set()
        for process in processes:
            with suppress(psutil.Error, OSError):
                sockets |= sockets_of(process.pid)
                files |= sglang_support.shared_memory(process.pid)
        return cls(processes, sockets & listening_sockets(), files)

    def assert_gone(self, limit_s: float = GONE_S) -> None:
        deadline = time.monotonic() + limit_s
        # A process of many threads keeps its sockets until the last of them has ended.
        while left := self._living() or self.sockets & listening_sockets():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert sglang_support.existing(self.shared_memory) == []

    def _living(self) -> list[psutil.Process]:
        return [p for p in self.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def sockets_of(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            name = os.readlink(path)
            if name.startswith("socket:["):
                found.add(name[len("socket:[") : -1])
    return found


def listening_sockets() -> set[str]:
    """Of TCP, all on this host."""
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for text in texts for line in text.splitlines()]
    return {row[9] for row in rows if row[3] == LISTENS}


def everything(run: LiveRun) -> Belongings:
    """Of all processes of the run; SGLang's own hide their markers behind their titles."""
    found = {process.pid: process for process in run.processes()}
    for process in list(found.values()):
        with suppress(psutil.Error):
            found |= {child.pid: child for child in process.children(recursive=True)}
    return Belongings.of(list(found.values()))


def stop(run: LiveRun, number: int) -> None:
    """By a signal to the job; nothing of it is left."""
    belongings = everything(run)
    run.kill(number)
    code = run.wait(60)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number), run.text()
    belongings.assert_gone()
