"""``python -I -S keeper.py PARENT DIRECTORY COMMAND...``: runs one command and ends everything that it started.

Orphans of the command become this process's children, whatever session or environment they took, so nothing escapes by
leaving its parent. All are killed when the command ends, on SIGTERM, and when the process that started this one
(PARENT) dies; in the last two cases DIRECTORY is removed too ("" = none).
Imports nothing of PEARL, since one runs beside every agent and every sandbox.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
NOT_STARTED = 127
"""As a shell says it."""


def main(parent: int, directory: str, command: list[str]) -> int:
    """Run the command, kill all its descendants, and return its exit code as a shell would."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    signal.signal(signal.SIGTERM, _stop)
    try:
        if os.getppid() != parent:  # it died before the kernel knew whom to tell
            raise _Stopped
        child = os.posix_spawnp(command[0], command, os.environ, setsigdef=[signal.SIGTERM])
        while True:
            pid, status = os.wait()
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    except _Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
        _remove(directory)
        return 128 + signal.SIGTERM
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return NOT_STARTED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()


def end_descendants() -> None:
    """Kill children until there are none: those of a killed one become ours and are next."""
    while True:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def _remove(directory: str) -> None:
    if directory:
        import shutil  # only here, since a keeper rarely needs it and starts before every agent

        shutil.rmtree(directory, ignore_errors=True)


class _Stopped(BaseException):
    """SIGTERM came."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
