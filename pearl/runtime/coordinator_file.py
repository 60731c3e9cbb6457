"""Where a run's coordinator is reached: a small file in the run directory, so that agents find every life of the run.

It is written whole or not at all. After ``kill -9`` of the coordinator it still says "running"; whoever reads it tries
the address, and reads the file again.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

NAME = "coordinator.json"
State = Literal["running", "stopped", "over"]
"""stopped: by a signal, as before a requeue, and to be resumed perhaps; over: finished or failed, nobody need wait."""


class CoordinatorFile(msgspec.Struct, frozen=True):
    address: str  # HOST:PORT
    run_id: str
    incarnation: int  # which life of the run, from 1
    state: State


def read(path: Path) -> CoordinatorFile | None:
    """Return what the file says, None when there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CoordinatorFile)
    except (OSError, msgspec.DecodeError):
        return None


def publish(run_dir: Path, address: str, run_id: str) -> CoordinatorFile:
    """Announce a new life of the run."""
    former = read(run_dir / NAME)
    lives = former.incarnation if former is not None and former.run_id == run_id else 0
    announced = CoordinatorFile(address, run_id, lives + 1, "running")
    _write(run_dir, announced)
    return announced


def close(run_dir: Path, announced: CoordinatorFile, state: State) -> None:
    """Say how this life of the run has ended, unless the file is of another one by now."""
    if read(run_dir / NAME) == announced:
        _write(run_dir, msgspec.structs.replace(announced, state=state))


def _write(run_dir: Path, content: CoordinatorFile) -> None:
    draft = run_dir / f".{NAME}.{os.getpid()}"
    draft.write_bytes(msgspec.json.encode(content))
    os.replace(draft, run_dir / NAME)
