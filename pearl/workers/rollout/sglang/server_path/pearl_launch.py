"""``python pearl_launch.py ARGUMENTS...``: SGLang's server in a process that dies with the worker that started it.

Runs with SGLang's interpreter, which need not have PEARL. SGLang's own processes watch their parent in turn.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent = int(sys.argv[1])
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)
    # The script's directory is on the path already; SGLang's children find it by PYTHONPATH.
    sys.argv = ["sglang.launch_server", *sys.argv[2:]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
