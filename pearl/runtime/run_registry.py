"""Which runs live on this host: a small JSON file each, so that ``pearl status`` finds a run by itself.

An entry names its process by pid and start time; entries of the dead are removed by whoever reads them.
"""

import os
import stat
import time
from pathlib import Path

import msgspec

from pearl.runtime.process_markers import process_start


class LiveRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run_id: str
    run_dir: str  # absolute
    address: str  # of the coordinator
    pid: int
    process_start: int  # clock ticks since boot
    registered_ns: int


def registry_directory() -> Path:
    """``$XDG_RUNTIME_DIR/pearl``, or ``/tmp/pearl-<uid>``; made when missing.

    Raises:
        ValueError: it is not a directory of ours that nobody else can write to.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = bool(base) and os.access(base, os.W_OK | os.X_OK)
    directory = Path(base) / "pearl" if usable else Path(f"/tmp/pearl-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{directory} is not a private directory of yours: remove it, or set XDG_RUNTIME_DIR"
        )
    return directory


def register(run_dir: Path, address: str, run_id: str, pid: int) -> LiveRun:
    """Announce a run; replaces an earlier entry of the same run id."""
    start = process_start(pid)
    assert start is not None, f"process {pid} does not live"
    run = LiveRun(run_id, str(run_dir.resolve()), address, pid, start, time.time_ns())
    path = _path(registry_directory(), run_id)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(msgspec.json.encode(run))
    os.replace(draft, path)
    return run


def unregister(run: LiveRun) -> None:
    """Take the entry back, unless another life of the run has replaced it."""
    path = _path(registry_directory(), run.run_id)
    if _read(path) == run:
        path.unlink(missing_ok=True)


def live_runs() -> list[LiveRun]:
    """All live runs of this user on this host, the newest first; removes the entries of dead ones."""
    runs = []
    for path in registry_directory().glob("*.json"):
        run = _read(path)
        if run is not None and process_start(run.pid) == run.process_start:
            runs.append(run)
        else:
            path.unlink(missing_ok=True)
    return sorted(runs, key=lambda run: run.registered_ns, reverse=True)


def find(run_dir: Path) -> LiveRun | None:
    """The live run of that directory."""
    wanted = str(run_dir.resolve())
    return next((run for run in live_runs() if run.run_dir == wanted), None)


def _path(directory: Path, run_id: str) -> Path:
    assert "/" not in run_id, run_id
    return directory / f"{run_id}.json"


def _read(path: Path) -> LiveRun | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LiveRun)
    except (OSError, msgspec.DecodeError):
        return None  # gone, or not one of ours
