"""Processes that answer a question before anything starts. They end with this one, and with them what they started."""

import os
import subprocess
import sys
from collections.abc import Sequence

from pearl.runtime import parent_death

KEEPER = "pearl.runtime.subreaper"


def probe(
    module: str, arguments: Sequence[str] = (), *, limit_s: float, question: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a module of ours to its end. TimeoutExpired when that is not within ``limit_s``."""
    return subprocess.run(
        [sys.executable, "-m", KEEPER, module, *arguments],
        input=question,
        capture_output=True,
        check=False,
        timeout=limit_s,
        env={**os.environ, parent_death.PARENT_VARIABLE: str(os.getpid())},
    )


def run_attached(module: str, arguments: Sequence[str], *, limit_s: float, question: bytes) -> int:
    """Run a module of ours to its end, its output to this process's own; its exit code.

    Raises:
        TimeoutExpired: that was not within ``limit_s``; it is ended.
    """
    return subprocess.run(
        [sys.executable, "-m", KEEPER, module, *arguments],
        input=question,
        check=False,
        timeout=limit_s,
        env={**os.environ, parent_death.PARENT_VARIABLE: str(os.getpid())},
    ).returncode
