"""What ``benchmarks/chaos.py`` does to a run. Each action hurts something that is there and says what it was.

Whom an action meets is drawn beforehand as a ratio of those that are there, so that a seed means the same on every
machine as far as the machines let it.
"""

import contextlib
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import psutil

from pearl.runtime import process_markers
from pearl.testing.elastic_run import FarHost, pearl
from pearl.testing.live_run import LiveRun, environ

PREEMPTIBLE = 2  # GPUs of the own host
FAR_HOSTS = ("far1", "far2")
LITTLE_GRACE_S = (0.0, 0.05, 0.5)
FAIR_GRACE_S = 6.0
REJOIN_S = 4.0  # until a host that left is there again
HOLD_S = 60.0  # for a joiner that is to be met while it starts
Later = tuple[float, Callable[[], str]]
Value = TypeVar("Value")


class Draw(NamedTuple):
    """Of one action: everything in it that is chance."""

    wait_steps: int
    kind: str
    pick: float  # 0 to 1
    amount: float  # 0 to 1


def draws(seed: int, kinds: tuple[str, ...]) -> Iterator[Draw]:
    """Without end. Each kind comes once before any comes again."""
    rng = random.Random(f"{seed}/actions")
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            yield Draw(rng.choice((0, 1, 1, 2)), kind, rng.random(), rng.random())


class Actions:
    def __init__(self, run: LiveRun, address: str, *, silent_s: float) -> None:
        """``silent_s``: whoever stands still for longer is given up by the coordinator."""
        self.run = run
        self.hosts: dict[str, FarHost] = {}
        self.stopped: list[psutil.Process] = []
        self.hurt: set[str] = set()  # groups that were met by an action
        self._address = address
        self._silent_s = silent_s
        self._later: list[Later] = []

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._by_kind)

    @property
    def _by_kind(self) -> dict[str, Callable[[Draw], str]]:
        return {
            "kill a rollout worker": lambda draw: self._kill("rollout.", draw),
            "kill the trainer": lambda draw: self._kill("training.", draw),
            "kill an environment worker": lambda draw: self._kill("environment.", draw),
            "kill an agent": self._kill_agent,
            "notice of an agent": self._notice,
            "stop a rollout worker for a moment": lambda draw: self._stop("rollout.", draw, 0.3),
            "stop a rollout worker for good": lambda draw: self._stop("rollout.", draw, 3.0),
            "slow snapshot": self._slow_snapshot,
            "lose frames of a peer": lambda draw: self._lose("drop in", draw),
            "lose frames to a peer": lambda draw: self._lose("drop out", draw),
            "delay frames of a worker": lambda draw: self._hold("delay", draw, 0.05 + 0.3 * draw.amount),
            "cut a worker off for a moment": lambda draw: self._hold("cut", draw, 0.0),
            "reclaim with too little grace": lambda draw: self._reclaim(draw, _one_of(LITTLE_GRACE_S, draw)),
            "planned reclaim": lambda draw: self._reclaim(draw, FAIR_GRACE_S),
            "arrival": lambda draw: self._arrive(),
            "arrival that fails half-way": self._arrive_and_fail,
        }

    def do(self, draw: Draw) -> str:
        """What was done; "" when there was nothing to do it to."""
        return self._by_kind[draw.kind](draw)

    # what follows later

    def due(self, *, everything: bool = False) -> list[str]:
        """Do what is due, or all that is still to come, and tell it; what follows from that comes later."""
        now = time.monotonic()
        ready = [item for item in self._later if everything or item[0] <= now]
        self._later = [item for item in self._later if item not in ready]
        return [told for _, follow in ready if (told := follow())]

    def _follow(self, seconds: float, follow: Callable[[], str]) -> None:
        self._later.append((time.monotonic() + seconds, follow))

    # processes

    def _kill(self, prefix: str, draw: Draw) -> str:
        found = self._ranks(prefix, draw)
        return _kill_all(found) if found else ""

    def _stop(self, prefix: str, draw: Draw, share: float) -> str:
        """For ``share`` of the time after which it is given up."""
        found = self._ranks(prefix, draw)
        if not found:
            return ""
        name, seconds = _named(found), share * self._silent_s * (0.5 + draw.amount / 2)
        for process in found:
            _send(process, signal.SIGSTOP)
        self.stopped.extend(found)

        def go_on() -> str:
            for process in found:
                _send(process, signal.SIGCONT)
            return f"SIGCONT {name}"

        self._follow(seconds, go_on)
        return f"SIGSTOP {name} for {seconds:.1f} s"

    def _slow_snapshot(self, draw: Draw) -> str:
        """The trainer stands still once its next version is out and the workers ask for it."""
        num_steps, until = len(self.run.steps()), time.monotonic() + HOLD_S

        def meet() -> str:
            if len(self.run.steps()) > num_steps:
                return self._stop("training.", draw, 0.5)
            if time.monotonic() < until:
                self._follow(0.0, meet)
            return ""

        self._follow(0.0, meet)
        return "waits for the next version"

    def _ranks(self, prefix: str, draw: Draw) -> list[psutil.Process]:
        """The worker processes of one group; its launcher is another one, environment workers have none."""
        groups: dict[str, list[psutil.Process]] = {}
        for process in self.run.processes(prefix):
            groups.setdefault(_group(process), []).append(process)
        groups.pop("", None)
        if not groups:
            return []
        name = _one_of(sorted(groups), draw)
        self.hurt.add(name)
        ranks = [process for process in groups[name] if process in self.run.ranks(name)]
        return ranks or groups[name]

    # hosts

    def join(self, name: str) -> str:
        output = self.run.run_dir.with_name(f"{self.run.run_dir.name}.{name}.out")
        self.hosts[name] = FarHost(self._address, name, output)
        return f"agent {name} starts, pid {self.hosts[name].process.pid}"

    def _kill_agent(self, draw: Draw) -> str:
        host = self._host(draw)
        if host is None:
            return ""
        host.kill()
        self._follow(REJOIN_S, lambda: self.join(host.name))
        return f"kill -9 agent {host.name}"

    def _notice(self, draw: Draw) -> str:
        host = self._host(draw)
        if host is None:
            return ""
        host.process.send_signal(signal.SIGTERM)

        def check() -> str:
            if host.process.poll() is None:  # it may be amid a coordinator's death
                self._follow(REJOIN_S, check)
                return ""
            return f"agent {host.name} left with exit code {host.process.returncode}; {self.join(host.name)}"

        self._follow(REJOIN_S, check)
        return f"SIGTERM agent {host.name}"

    def _host(self, draw: Draw) -> FarHost | None:
        living = [self.hosts[name] for name in sorted(self.hosts) if self.hosts[name].process.poll() is None]
        return _one_of(living, draw) if living else None

    # frames

    def _lose(self, fault: str, draw: Draw) -> str:
        kind = _one_of(("rollout", "rollout", "training", "environment"), draw)
        return self._notify(fault, kind, draw, 1 + int(3 * draw.amount))

    def _hold(self, fault: str, draw: Draw, value: float) -> str:
        told = self._notify(fault, "rollout", draw, value)
        self._follow(0.3 * self._silent_s, lambda: self._notify("heal", "rollout", draw, 0.0))
        return told

    def _notify(self, fault: str, kind: str, draw: Draw, value: float) -> str:
        order = {"fault": fault, "kind": kind, "index": int(draw.pick * 1000), "value": value}
        stream = self.run.process.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(order).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:  # the coordinator is dead, and with it the fault
            return ""
        return f"frames of {kind}: {fault} {value:g}"

    # GPUs

    def _reclaim(self, draw: Draw, grace_s: float) -> str:
        there = [gpu for gpu in self._gpus() if gpu["present"] and not gpu["reclaiming"]]
        if not there:
            return ""
        return self._preempt("reclaim", _one_of(there, draw)["gpu"], "--grace", f"{grace_s:g}")

    def _arrive(self) -> str:
        absent = [gpu for gpu in self._gpus() if not gpu["present"] and gpu["gpu"].startswith("local/")]
        return self._preempt("arrive", absent[0]["gpu"]) if absent else ""

    def _arrive_and_fail(self, draw: Draw) -> str:
        """Whoever starts next is killed before it is up."""
        before = {_group(process) for process in self.run.processes("rollout.")}
        told = self._arrive()
        if not told:
            return ""
        until = time.monotonic() + HOLD_S

        def meet() -> str:
            joiners = [p for p in self.run.processes("rollout.") if _group(p) not in before | {""}]
            if not joiners and time.monotonic() < until:
                self._follow(0.05, meet)
                return ""
            self.hurt.update(map(_group, joiners))
            return f"joiner: {_kill_all(joiners)}" if joiners else "no joiner came"

        self._follow(0.05, meet)
        return told

    def _gpus(self) -> list[dict[str, str]]:
        status = pearl("status", "--json", "--run-dir", str(self.run.run_dir))
        if status.returncode:
            return []
        found: list[dict[str, str]] = json.loads(status.stdout)["gpus"]
        return [gpu for gpu in found if gpu["zone"] == "preemptible"]

    def _preempt(self, action: str, gpu: str, *words: str) -> str:
        result = pearl("preempt", action, "--gpus", gpu, *words, "--run-dir", str(self.run.run_dir))
        answer = (result.stdout + result.stderr).strip().splitlines()
        return f"{action} {gpu} {' '.join(words)}: {answer[-1] if answer else result.returncode}"

    # the end

    def calm(self) -> None:
        """Nothing stands still or is held back any more."""
        for process in self.stopped:
            _send(process, signal.SIGCONT)

    def end_hosts(self, limit_s: float) -> list[str]:
        """Agents that did not end well with the run, killed or gone."""
        deadline = time.monotonic() + limit_s
        bad = []
        for host in self.hosts.values():
            try:
                code = host.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                host.kill()
                code = -9
            if code:
                bad.append(f"{host.name} ended with exit code {code}")
        return bad


def _one_of(values: Sequence[Value], draw: Draw) -> Value:
    return values[min(int(draw.pick * len(values)), len(values) - 1)]


def _group(process: psutil.Process) -> str:
    return environ(process).get(process_markers.GROUP_VARIABLE, "")


def _named(found: list[psutil.Process]) -> str:
    return f"{_group(found[0])} ({', '.join(str(process.pid) for process in found)})"


def _kill_all(found: list[psutil.Process]) -> str:
    name = _named(found)
    for process in found:
        _send(process, signal.SIGKILL)
    return f"kill -9 {name}"


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
