"""Finds and ends the processes of a run or a group by the markers in their environment. Linux only.

A tree walk misses whoever was re-parented; the markers are inherited and stay. Descendants of marked processes
count too, whatever environment they were given. The calling process and its ancestors are never included.
"""

import logging
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from pearl.runtime.pidfd import wait_exited

RUN_VARIABLE = "PEARL_RUN_ID"
GROUP_VARIABLE = "PEARL_GROUP"
KILL_LIMIT_S = (
    5.0  # SIGKILL acts in milliseconds; longer means stuck inside the kernel, and waiting won't help
)

log = logging.getLogger(__name__)


def process_start(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot; None when there is none or only its zombie is left.

    With the pid it names a process for good: a reused pid has another start.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def find_marked(run_id: str, group: str | None = None) -> list[int]:
    """Living processes that carry the run's marker, and the group's when one is given."""
    assert run_id, "an empty marker would match strangers"
    wanted = {f"{RUN_VARIABLE}={run_id}".encode()}
    if group is not None:
        wanted.add(f"{GROUP_VARIABLE}={group}".encode())
    spared = _self_and_ancestors()
    return [pid for pid in _pids() if pid not in spared and wanted <= _environment(pid)]


def with_descendants(pids: Iterable[int]) -> list[int]:
    """The living of ``pids`` and all their descendants, in no order."""
    children: dict[int, list[int]] = {}
    living = set()
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None and fields[0] != "Z":
            living.add(pid)
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    queue = list(pids)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue.extend(children.get(pid, ()))
    return list((found & living) - _self_and_ancestors())


async def kill_run(run_id: str, limit_s: float = KILL_LIMIT_S) -> int:
    """Kill -9 every process of the run on this host, sandboxes and re-parented ones included.

    For the coordinator's own end, and for a next life of the same run directory. Returns how many were killed.
    """
    return await kill_marked(run_id, None, limit_s)


async def kill_marked(run_id: str, group: str | None, limit_s: float = KILL_LIMIT_S) -> int:
    """Kill -9 the run's (or one group's) processes until none is found. Returns how many were killed."""
    killed: set[int] = set()
    while members := with_descendants(find_marked(run_id, group)):
        # Whoever forks while it is being killed leaves a child for the next round.
        with open_pidfds(members) as fds:
            killed.update(members)
            send(fds, signal.SIGKILL)
            if not await wait_exited(fds, limit_s):
                log.error("run %s: processes do not end on SIGKILL within %g s: %s", run_id, limit_s, members)
                break
    return len(killed)


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


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except (OSError, ValueError):
        return set()  # another user's, a zombie, or gone


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command name: state, parent, ..., start time at index 19."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _self_and_ancestors() -> set[int]:
    spared, pid = set(), os.getpid()
    while pid > 0:
        spared.add(pid)
        fields = _stat(pid)
        pid = int(fields[1]) if fields is not None else 0
    return spared
