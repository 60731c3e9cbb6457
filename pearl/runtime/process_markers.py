"""Finds and ends the processes of a run or a group: by the markers in their environment, and by descent. Linux only.

The markers are inherited and stay when a parent dies. Who was given another environment is found by descent, which
``pearl.runtime.subreaper`` keeps whole. The calling process and its ancestors are never included.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from pearl.runtime.pidfd import wait_exited

RUN_VARIABLE = "PEARL_RUN_ID"
GROUP_VARIABLE = "PEARL_GROUP"
KILL_LIMIT_S = (
    5.0  # SIGKILL acts in milliseconds; longer means stuck inside the kernel, and waiting won't help
)

log = logging.getLogger(__name__)


class Killed(NamedTuple):
    """What came of killing processes."""

    num_killed: int
    survivors: tuple[str, ...]  # who did not end within the limit, each in words


def process_start(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot; None when there is none or only its zombie is left."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def find_marked(run_id: str, group: str | None = None) -> list[int]:
    """Living processes that carry the run's marker, and the group's when one is given."""
    assert run_id, "an empty marker would match strangers"
    spared = _self_and_ancestors()
    return [pid for pid in psutil.pids() if pid not in spared and is_marked(pid, run_id, group)]


def is_marked(pid: int, run_id: str, group: str | None = None) -> bool:
    """Return whether the process carries the run's marker, and the group's when one is given."""
    wanted = {f"{RUN_VARIABLE}={run_id}".encode()}
    if group is not None:
        wanted.add(f"{GROUP_VARIABLE}={group}".encode())
    return wanted <= _environment(pid)


def with_descendants(pids: Iterable[int]) -> list[int]:
    """The living of ``pids`` and all their descendants, in no order."""
    found: set[int] = set()
    for pid in pids:
        if pid in found:
            continue
        try:
            process = psutil.Process(pid)
            tree = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        found.update(member.pid for member in tree if is_living(member))
    return list(found - _self_and_ancestors())


def is_living(process: psutil.Process) -> bool:
    """Return whether it is neither gone nor a zombie that waits for its parent."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def describe(pid: int) -> str:
    """Return the process in words, for the person who has to deal with it."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return f"pid {pid} ({process.name()}, {process.status()})"
    except psutil.Error:
        return f"pid {pid}"


async def kill_run(run_id: str, limit_s: float = KILL_LIMIT_S) -> Killed:
    """Kill -9 every process of the run on this host, sandboxes and re-parented ones included.

    For the coordinator's own end, and for a next life of the same run directory.
    """
    return await kill_marked(run_id, None, limit_s)


async def kill_marked(run_id: str, group: str | None, limit_s: float = KILL_LIMIT_S) -> Killed:
    """Kill -9 the run's (or one group's) processes until none is found."""
    return await kill_all(lambda: with_descendants(find_marked(run_id, group)), limit_s)


async def kill_all(find: Callable[[], list[int]], limit_s: float = KILL_LIMIT_S) -> Killed:
    """Kill -9 whomever ``find`` names until it names nobody any more."""
    killed: set[int] = set()
    while members := find():
        # Whoever forks while it is being killed leaves a child for the next round.
        with open_pidfds(members) as fds:
            killed.update(members)
            send(fds, signal.SIGKILL)
            if not await wait_exited(fds, limit_s):
                survivors = tuple(map(describe, find()))
                log.error("processes do not end on SIGKILL within %g s: %s", limit_s, ", ".join(survivors))
                return Killed(len(killed), survivors)
    return Killed(len(killed), ())


@contextmanager
def open_pidfds(pids: Iterable[int]) -> Iterator[list[int]]:
    """A pidfd for each process that still lives; signals sent through one never reach a reused pid."""
    fds: list[int] = []
    try:
        for pid in pids:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def send(fds: Sequence[int], number: signal.Signals) -> None:
    """Signal every process that is still there."""
    for fd in fds:
        try:
            signal.pidfd_send_signal(fd, number)
        except (ProcessLookupError, PermissionError):
            continue  # gone already, or a set-uid program that ends with its parent's pipes


def _environment(pid: int) -> set[bytes]:
    # As bytes: an environment need not be text, nor hold a value for each name, as psutil takes it to.
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except (OSError, ValueError):
        return set()  # another user's, a zombie, or gone


def _self_and_ancestors() -> set[int]:
    own = psutil.Process()
    return {own.pid, *(parent.pid for parent in own.parents())}
