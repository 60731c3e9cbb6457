"""Ties a process's life to its parent's, so that kill -9 of a launcher leaves nobody behind. Linux only.

The kernel sends the death signal, so it works for a process that is stuck or stopped. The chain is coordinator,
agent, torchrun, rank: each was told its parent's id in ``PEARL_PARENT`` and tells its own to its children.
"""

import ctypes
import os
import signal

PARENT_VARIABLE = "PEARL_PARENT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def watch_parent(death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have ``death_signal`` sent to this process when its parent ends; harmless when called again.

    Call it first thing in ``main``, before any thread starts. The signal is tied to the parent's *thread* that
    started this process, so a parent starts children from its event loop's thread only.
    """
    mine = str(os.getpid())
    expected = os.environ.get(PARENT_VARIABLE, "")
    before = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    os.environ[PARENT_VARIABLE] = mine
    # A parent that died before the call above sends nothing: being adopted already is the only trace of it.
    told = expected not in ("", mine)
    if os.getppid() != (int(expected) if told else before):
        os.kill(os.getpid(), death_signal)
