"""Starts, watches and ends one group of processes, a fault domain: torchrun with its ranks, or one plain process.

The process that is started first is a ``subreaper``: ending a group ends everything below it and everything that
carries its markers, whoever its parent is by then. Under uvloop and asyncio children are started from the loop's
thread, which is what ``lifeline`` asks for.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from pearl.runtime import failure_file, mmap_counter, parent_death, process_markers
from pearl.runtime.failure_file import Failure
from pearl.runtime.forked_child import ForkedChild
from pearl.runtime.pidfd import wait_exited
from pearl.runtime.prepared_process import PreparedProcess, common_environment
from pearl.types.messages.control import StartGroup

LOG_TAIL_BYTES = 4096  # enough for a Python traceback
_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Exit(msgspec.Struct, frozen=True):
    """How a group ended."""

    code: int | None  # of the launcher; -N = by signal N; None = it never ran
    reason: str
    log_tail: str
    counter: int | None = None  # last value of the group's counter file, when a process kept one
    failure: Failure | None = None  # the first error that ended a process of it, when there was one


class ProcessGroup:
    """One life of a group; not to be started twice.

    Rank r writes to ``log_directory/group/rank<r>.log`` (a plain process is rank 0), torchrun to ``launcher.log``.
    """

    def __init__(self, spec: StartGroup, run_id: str, prepared: PreparedProcess | None = None) -> None:
        """``prepared`` starts the group where the spec allows it and it can."""
        if not _GROUP_NAME.fullmatch(spec.group):
            raise ValueError(
                f"group name {spec.group!r}: use letters, digits, _ and -, in parts joined by dots"
            )
        if spec.num_processes < 0:
            raise ValueError(f"group {spec.group}: num_processes = {spec.num_processes}, must be 0 or more")
        self.spec = spec
        self.run_id = run_id
        self.directory = Path(spec.log_directory) / spec.group
        self._counter_path = Path(
            spec.environment.get(mmap_counter.ENVIRONMENT_KEY, self.directory / mmap_counter.DEFAULT_NAME)
        )
        self._failure_path = self.directory / failure_file.NAME
        self._prepared = prepared if spec.may_fork and spec.num_processes else None
        self._process: asyncio.subprocess.Process | ForkedChild | None = None
        self._exit: Exit | None = None
        self._stop_reason = ""
        self._ending = asyncio.Lock()  # a stop() waits for the start, and a wait() lets it keep its grace

    @property
    def pid(self) -> int | None:
        """Return the pid of the subreaper, above all others of the group."""
        return None if self._process is None else self._process.pid

    async def start(self) -> int:
        """Start it and return the subreaper's pid. OSError when the log directory or the program is unusable."""
        assert self._process is None
        async with self._ending:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._failure_path.unlink(missing_ok=True)
            log = self.directory / ("launcher.log" if self.spec.num_processes else "rank0.log")
            environment = group_environment(
                self.spec, self.run_id, os.environ, self._counter_path, self._failure_path
            )
            process = await self._fork(environment, log) or await self._execute(environment, log)
            self._process = process
        return process.pid

    async def _fork(self, environment: dict[str, str], log: Path) -> ForkedChild | None:
        if self._prepared is None:
            return None
        words = forking_command_line(self.spec, self.directory)
        child = await self._prepared.fork(self.spec.group, words, environment, log)
        if child is None:
            # One that was forked without an answer is nobody's.
            await process_markers.kill_marked(self.run_id, self.spec.group)
        return child

    async def _execute(self, environment: dict[str, str], log: Path) -> asyncio.subprocess.Process:
        with _open_log(log) as output:
            return await asyncio.create_subprocess_exec(
                *command_line(self.spec, self.directory),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is for the coordinator, which ends the groups
            )

    async def wait(self) -> Exit:
        """Wait until the launcher has exited; then nothing of the group is left. Any number of tasks may wait."""
        assert self._process is not None
        code = await self._process.wait()
        async with self._ending:
            if self._exit is None:
                await self._kill()
                reason = self._stop_reason or _describe(code)
                self._exit = Exit(
                    code,
                    reason,
                    log_tail(self.directory),
                    mmap_counter.read(self._counter_path),
                    failure_file.read(self._failure_path),
                )
            return self._exit

    async def stop(self, grace_s: float, reason: str = "stopped as asked") -> int:
        """SIGTERM to all members, SIGKILL to those still there after ``grace_s`` (0 = at once) and to a launcher
        whose ranks are gone: torchrun takes seconds to end, in which it has nothing to put in order for us.

        Ranks under torchrun may see SIGTERM twice, since torchrun forwards its own. Returns how many were killed.
        """
        async with self._ending:
            if self._exit is not None:
                return 0
            self._stop_reason = reason
            if grace_s > 0:
                await self._terminate(grace_s)
            return await self._kill()

    async def _kill(self) -> int:
        """End the others first: the subreaper has to hold on to those that only descent tells of."""
        group, run_id, subreaper = self.spec.group, self.run_id, self.pid

        def others() -> list[int]:
            found = process_markers.with_descendants(process_markers.find_marked(run_id, group))
            return [pid for pid in found if pid != subreaper]

        killed = await process_markers.kill_all(others)
        assert subreaper is not None
        if self._process is not None and self._process.returncode is None:
            with process_markers.open_pidfds([subreaper]) as fds:
                process_markers.send(fds, signal.SIGCONT)
                if not await wait_exited(fds, process_markers.KILL_LIMIT_S):
                    process_markers.send(fds, signal.SIGKILL)
        return killed.num_killed

    async def _terminate(self, grace_s: float) -> None:
        found = [pid for pid in process_markers.find_marked(self.run_id, self.spec.group) if pid != self.pid]
        torchrun = self._torchrun()
        with (
            process_markers.open_pidfds(pid for pid in found if pid not in torchrun) as fds,
            process_markers.open_pidfds(pid for pid in found if pid in torchrun) as launchers,
        ):
            for receivers in (fds, launchers):
                process_markers.send(receivers, signal.SIGTERM)
                process_markers.send(
                    receivers, signal.SIGCONT
                )  # who is stopped sees SIGTERM only when it runs again
            await wait_exited(fds, grace_s)

    def _torchrun(self) -> set[int]:
        """Kill the launcher: torchrun has no clean-up of its own that matters."""
        if self.pid is None or self.spec.num_processes == 0:
            return set()
        with suppress(psutil.Error):
            return {child.pid for child in psutil.Process(self.pid).children()}
        return set()


def command_line(spec: StartGroup, directory: Path) -> list[str]:
    spawn = [sys.executable, "-u", "-m", "pearl.runtime.subreaper"]
    if spec.num_processes == 0:
        return [*spawn, spec.module, *spec.arguments]
    return [*spawn, "torch.distributed.run", *_torchrun_arguments(spec, directory)]


def forking_command_line(spec: StartGroup, directory: Path) -> list[str]:
    """Return the arguments of the subreaper of a group that a prepared process forks."""
    return ["pearl.workers.forking_launcher", *_torchrun_arguments(spec, directory)]


def _torchrun_arguments(spec: StartGroup, directory: Path) -> list[str]:
    return [
        "--standalone",  # the rendezvous store binds port 0 and the ranks use that same store: no port is guessed
        "--local-addr=127.0.0.1",  # the host's own name need not resolve
        f"--nproc-per-node={spec.num_processes}",
        "--max-restarts=0",
        f"--log-dir={directory / 'torchrun'}",  # or it leaves a directory in /tmp for every group
        "-m",
        "pearl.runtime.child_entrypoint",
        *(_literal(word) for word in ("--log-directory", str(directory), spec.module, *spec.arguments)),
    ]


def _literal(word: str) -> str:
    """Escape an argument for torchrun, which takes arguments as templates with $ as the mark."""
    return word.replace("$", "$$")


def group_environment(
    spec: StartGroup, run_id: str, base: Mapping[str, str], counter_path: Path, failure_path: Path
) -> dict[str, str]:
    """Return the environment of the group's processes: ours, then what the coordinator sets, then the markers."""
    files = {
        mmap_counter.ENVIRONMENT_KEY: str(counter_path),
        failure_file.ENVIRONMENT_KEY: str(failure_path),
    }
    return common_environment(base, files | spec.environment) | {
        process_markers.RUN_VARIABLE: run_id,
        process_markers.GROUP_VARIABLE: spec.group,
        parent_death.PARENT_VARIABLE: str(os.getpid()),
    }


def log_tail(directory: Path, limit_bytes: int = LOG_TAIL_BYTES) -> str:
    """The ends of the ranks' and the launcher's logs, sharing ``limit_bytes``; a file's name heads its part."""
    paths = sorted(path for path in directory.glob("*.log") if path.stat().st_size > 0)
    share = limit_bytes // max(1, len(paths))
    return "\n".join(f"[{path.name}]\n{_tail(path, share)}" for path in paths)


def _open_log(path: Path) -> BinaryIO:
    return open(path, "ab")


def _tail(path: Path, limit_bytes: int) -> str:
    with open(path, "rb") as file:
        skipped = max(0, path.stat().st_size - limit_bytes)
        file.seek(skipped)
        tail = file.read(limit_bytes).decode(errors="replace").strip()
    # Part of a line would be taken for one.
    return tail.partition("\n")[2] or tail if skipped else tail


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"killed by signal {-code} ({signal.strsignal(-code)})"
