"""``python -m pearl.workers.forking_launcher``: torchrun, whose ranks are forked from it instead of started anew.

torchrun offers to fork Python functions, but waits for what they return, and ours end by ``os._exit``. So it is given
the usual command line, and only the call that starts a process is another: rendezvous, environment, log files, exit
codes and the common end of the ranks are torchrun's own.
"""

import gc
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from pearl.runtime import child_entrypoint
from pearl.workers.forked_main import end_after, reset_signals, take_environment

ENTRYPOINT = "pearl.runtime.child_entrypoint"


class ForkedRank:
    """The part of ``subprocess.Popen`` that torchrun uses."""

    def __init__(self, args: Sequence[str], environment: Mapping[str, str]) -> None:
        place = list(args).index(ENTRYPOINT)
        self.args = args
        self.returncode: int | None = None
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            end_after(lambda: _run_rank(environment, args[place + 1 :]))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ready, _, _ = select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
            if not ready:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def main(arguments: Sequence[str]) -> None:
    from torch.distributed import run

    start: Callable[..., Any] = lambda _, args, env: ForkedRank(args, env)  # noqa: E731
    SubprocessHandler._popen = start  # type: ignore[method-assign]
    run.main(list(arguments))


def _run_rank(environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    os.setsid()
    reset_signals()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the launcher's store listens on some
    take_environment(environment)
    _reseed()
    child_entrypoint.main(arguments)


def _reseed() -> None:
    """Give this rank random numbers of its own where no seed is set; Python's are its own already."""
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(None)


if __name__ == "__main__":
    main(sys.argv[1:])
