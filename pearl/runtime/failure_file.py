"""Why a process group failed, in a file that outlives it: the first error of the first process that had one.

The end of a log often shows what followed from it: other ranks' lost connections, a launcher's own report.
"""

import os
from pathlib import Path

import msgspec

from pearl.runtime.errors import FinalError

ENVIRONMENT_KEY = "PEARL_FAILURE_FILE"
NAME = "failure.json"
MAX_REASON = 2000  # characters


class Failure(msgspec.Struct, frozen=True):
    reason: str
    is_final: bool  # no later try can succeed


def write(error: BaseException) -> None:
    """Into the file that the environment names, unless one of the group did so before."""
    path = os.environ.get(ENVIRONMENT_KEY)
    if path is None:
        return
    found = _first_leaf(error)
    text = str(found).encode("utf-8", "replace").decode()
    is_final = isinstance(found, FinalError)
    reason = text if is_final else f"{type(found).__name__}: {text}"
    data = msgspec.json.encode(Failure(reason[:MAX_REASON], is_final))
    try:
        with open(path, "xb") as file:
            file.write(data)
    except OSError:
        return  # another was first, or the directory is gone: the log still has it


def read(path: Path) -> Failure | None:
    """None when no process of the group wrote one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except (OSError, msgspec.DecodeError):
        return None


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
