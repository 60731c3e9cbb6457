"""``python -m pearl.runtime.subreaper MODULE ARGUMENTS...``: runs ``pearl.runtime.child_entrypoint`` in a child and
keeps hold of all that descends from it. Linux only.

The kernel hands a process whose parent died to its nearest living ancestor that is a subreaper. So whatever a group
starts, with whatever environment, in whatever session, stays below this process, which ends it all when the child has
ended or when its own parent dies. It passes signals on to the child and ends as the child did.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from pearl.runtime import child_entrypoint
from pearl.runtime.parent_death import watch_parent

KILL_LIMIT_S = 5.0
RETRY_S = 0.002
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def become_subreaper() -> None:
    """Have orphans below this process handed to it instead of to init. It has to reap them then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def adopt_orphans() -> bool:
    """Become a subreaper unless this process has children already, as a program that a shell has turned into: their
    descendants are not ours to end. Returns whether all descendants are ours from now on."""
    import psutil

    if psutil.Process().children():
        return False
    become_subreaper()
    return True


def main(arguments: Sequence[str]) -> None:
    watch_parent(signal.SIGTERM)  # not SIGKILL: it has others to end first
    become_subreaper()
    parent = os.getppid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        child_entrypoint.main(arguments)
        return
    _keep(child, parent)


def _keep(child: int, parent: int) -> NoReturn:
    status: int | None = None
    while status is None and os.getppid() == parent:
        number = signal.sigwait(SIGNALS)
        status = _reap(child)
        if status is None and number != signal.SIGCHLD and os.getppid() == parent:
            os.kill(child, number)  # not reaped, so the pid is still the child's
    status = _end_descendants(child, status)
    _end_as(status)


def _reap(child: int) -> int | None:
    """Take leave of all that have ended; the child's status when it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = ended


def _end_descendants(child: int, status: int | None) -> int:
    import psutil

    deadline = time.monotonic() + KILL_LIMIT_S
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            try:
                process.kill()
            except psutil.Error:
                continue
        ended = _reap(child)
        status = ended if ended is not None else status
        if time.monotonic() > deadline:
            sys.stderr.write(f"processes do not end on SIGKILL: {[process.pid for process in descendants]}\n")
            break
        time.sleep(RETRY_S)
    return signal.SIGKILL if status is None else status


def _end_as(status: int) -> NoReturn:
    """Exit with the exit code of ``status``, or by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    sys.stderr.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its own, if any was wanted
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
