"""The run directory: what a run leaves behind for people and programs, and how each line gets there exactly once.

``config.toml`` and ``config.json`` the resolved settings, ``journal.msgpack/`` and ``tokens/`` the state,
``metrics.jsonl``, ``trajectories.jsonl`` and ``summary.json`` the results, ``profile.json`` what was measured,
``logs/`` a directory a process group.

A crash may come between a journal entry and its lines. Therefore every journal segment has a mark: the sizes that
the two files had when it was opened. A resume cuts both back to the mark and writes the segment's lines again.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from pearl.config import resolved_json, resolved_toml
from pearl.core.elastic.profile_file import write_profile
from pearl.types.commands import Report
from pearl.types.config import Config
from pearl.types.profile import Profile
from pearl.types.reports import line_of
from pearl.types.trajectory import TrajectoryRecord

RESULT_NAMES = ("metrics.jsonl", "trajectories.jsonl")


class FileOffsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where everything stood before journal entry ``first_entry``."""

    first_entry: int
    now: float  # seconds since the run's start
    sizes: tuple[int, int]  # bytes of the result files, in the order of RESULT_NAMES


class RunFiles:
    """The one writer of the run directory's results. Lines of the two result files gather until ``flush``: a step ends
    with one for each of its trajectories. All else is with the OS when the call returns."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.logs = run_dir / "logs"
        self.config_json = run_dir / "config.json"
        self.journal = run_dir / "journal.msgpack"
        self.tokens = run_dir / "tokens"
        self._marks = run_dir / "marks.json"
        self.logs.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fds = [os.open(run_dir / name, flags, 0o644) for name in RESULT_NAMES]
        self._pending = [bytearray() for _ in RESULT_NAMES]

    def write_config(self, config: Config) -> None:
        _replace(self.run_dir / "config.toml", resolved_toml(config).encode())
        _replace(self.config_json, resolved_json(config).encode())

    def report(self, report: Report) -> None:
        self._append(0, line_of(report.report))

    def trajectory(self, record: TrajectoryRecord) -> None:
        self._append(1, record)

    def flush(self) -> None:
        """All lines so far are with the OS on return. After an OSError the run must end."""
        for fd, pending in zip(self._fds, self._pending, strict=True):
            while pending:
                del pending[: os.write(fd, pending)]

    def summary(self, summary: dict[str, Any]) -> None:
        _replace(self.run_dir / "summary.json", msgspec.json.format(strict_json(summary), indent=2) + b"\n")

    def profile(self, profile: Profile) -> None:
        """For ``pearl decide`` and the simulator."""
        _replace(self.run_dir / "profile.json", write_profile(profile))

    def save_offsets(self, first_entry: int, now: float) -> None:
        """Note the sizes for the journal segment that is about to be opened at ``first_entry``."""
        self.flush()
        sizes = [os.fstat(fd).st_size for fd in self._fds]
        # The mark before stays: the segment that this one is for may never come to be.
        marks = [*self._read_marks()[-1:], FileOffsets(first_entry, now, (sizes[0], sizes[1]))]
        _replace(self._marks, msgspec.json.encode(marks))

    def truncate_to_offsets(self, first_entry: int) -> FileOffsets:
        """Cut the result files back to the mark of the segment that begins at ``first_entry``, and return it.

        Raises:
            ValueError: there is no such mark, or the files are shorter than it says.
        """
        self.flush()
        mark = next((mark for mark in self._read_marks() if mark.first_entry == first_entry), None)
        if mark is None:
            raise ValueError(
                f"{self._marks} knows nothing of journal entry {first_entry}: it is not this run's; restore it"
            )
        for fd, name, size in zip(self._fds, RESULT_NAMES, mark.sizes, strict=True):
            if os.fstat(fd).st_size < size:
                raise ValueError(
                    f"{self.run_dir / name} is shorter than its {size} bytes at the last snapshot: restore it"
                )
            os.ftruncate(fd, size)
        return mark

    def remove(self) -> None:
        """Leave nothing of a run that never began but its logs."""
        shutil.rmtree(self.journal, ignore_errors=True)
        shutil.rmtree(self.tokens, ignore_errors=True)
        for path in (self.run_dir / "config.toml", self.config_json, self._marks):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """What was not flushed is lost, as in a crash; a resume writes it again."""
        while self._fds:
            os.close(self._fds.pop())

    def _append(self, index: int, values: Any) -> None:
        self._pending[index] += strict_json(values) + b"\n"

    def _read_marks(self) -> list[FileOffsets]:
        try:
            return msgspec.json.decode(self._marks.read_bytes(), type=list[FileOffsets])
        except FileNotFoundError:
            return []


def strict_json(values: Any) -> bytes:
    """JSON that any strict reader takes: msgspec writes null for a number that is not finite."""
    return msgspec.json.encode(values)


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
