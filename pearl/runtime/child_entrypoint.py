"""``python -m pearl.runtime.child_entrypoint [--log-directory D] MODULE ARGUMENTS...`` runs MODULE as ``python -m``
would, in a process that dies with its parent and, with ``--log-directory``, writes to ``D/rank<LOCAL_RANK>.log``.

It stands between every launcher and what it launches, so that no worker has to remember either.
"""

import os
import runpy
import sys
from collections.abc import Sequence

from pearl.runtime import failure_file
from pearl.runtime.parent_death import watch_parent


def redirect_output(directory: str) -> None:
    """Point stdout and stderr of this process, and of those it starts, at its rank's own file."""
    path = os.path.join(directory, f"rank{os.environ.get('LOCAL_RANK', '0')}.log")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main(arguments: Sequence[str]) -> None:
    watch_parent()
    rest = list(arguments)
    if rest[:1] == ["--log-directory"]:
        redirect_output(rest[1])
        rest = rest[2:]
    if not rest:
        raise ValueError(
            "no module to run: python -m pearl.runtime.child_entrypoint [--log-directory D] MODULE ARGUMENTS..."
        )
    sys.argv = rest
    try:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        failure_file.write(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
