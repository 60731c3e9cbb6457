"""The run directory: what a run leaves behind for people and programs, and how each line gets there exactly once.

``config.toml`` and ``config.json`` the resolved settings, ``journal.msgpack/`` and ``tokens/`` the state,
``metrics.jsonl``, ``trajectories.jsonl`` and ``summary.json`` the results, ``profile.json`` what was measured,
``logs/`` a directory a process group.

A crash may come between a journal entry and its lines. Therefore every journal segment has a mark: the sizes and
digests that the two files had when it was opened. A resume cuts both back to the mark and writes the segment's lines
again, or all lines of the journal when a file or the mark is not what it was.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pearl.config import resolved_json, resolved_toml
from pearl.core.elastic.profile_file import write_profile
from pearl.service.result_file import ResultFile
from pearl.types.commands import Report
from pearl.types.config import Config
from pearl.types.error_text import without_surrogates
from pearl.types.profile import Profile
from pearl.types.reports import line_of
from pearl.types.trajectory import TrajectoryRecord

RESULT_NAMES = ("metrics.jsonl", "trajectories.jsonl")


class FileOffsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where everything stood before journal entry ``first_entry``."""

    first_entry: int
    now: float  # seconds since the run's start
    sizes: tuple[int, int]  # bytes of the result files, in the order of RESULT_NAMES
    digests: tuple[str, str] | None = None  # of those bytes


class NotAsWrittenError(ValueError):
    """The results or their marks are not what the run left; the text says which and how they can be had again."""


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
        self.results = tuple(ResultFile(run_dir / name) for name in RESULT_NAMES)
        self._documents: dict[Path, bytes] = {}  # what was written whole

    def write_config(self, config: Config) -> None:
        self._write(self.run_dir / "config.toml", resolved_toml(config).encode())
        self._write(self.config_json, resolved_json(config).encode())

    def report(self, report: Report) -> None:
        self.results[0].append(strict_json(line_of(report.report)) + b"\n")

    def trajectory(self, record: TrajectoryRecord) -> None:
        self.results[1].append(strict_json(record) + b"\n")

    def flush(self) -> None:
        """All lines so far are with the OS on return. After an OSError the run must end."""
        for result in self.results:
            result.flush()

    def summary(self, summary: dict[str, Any]) -> None:
        self._write(
            self.run_dir / "summary.json", msgspec.json.format(strict_json(summary), indent=2) + b"\n"
        )

    def profile(self, profile: Profile) -> None:
        """Write profile.json, for ``pearl decide`` and the simulator."""
        self._write(self.run_dir / "profile.json", write_profile(profile))

    def save_offsets(self, first_entry: int, now: float) -> None:
        """Note the sizes for the journal segment that is about to be opened at ``first_entry``."""
        self.flush()
        metrics, trajectories = self.results
        mark = FileOffsets(
            first_entry, now, (metrics.size, trajectories.size), (metrics.digest, trajectories.digest)
        )
        # The mark before stays: the segment that this one is for may never come to be.
        before: list[FileOffsets] = []
        with suppress(NotAsWrittenError):
            before = self._read_marks()[-1:]
        replace_file(self._marks, msgspec.json.encode([*before, mark]))

    def truncate_to_offsets(self, first_entry: int) -> FileOffsets:
        """Cut the result files back to the mark of the segment that begins at ``first_entry``, and return it.

        Raises:
            NotAsWrittenError: there is no such mark, or the files do not hold what it says.
        """
        self.flush()
        mark = next((mark for mark in self._read_marks() if mark.first_entry == first_entry), None)
        if mark is None:
            raise NotAsWrittenError(f"{self._marks} has no mark of journal entry {first_entry}")
        for result, size, digest in zip(self.results, mark.sizes, mark.digests or (None, None), strict=True):
            if damage := result.cut(size, digest):
                raise NotAsWrittenError(damage)
        return mark

    def damaged_documents(self) -> list[Path]:
        """Return the files written whole by this process of which the disk does not hold what was written."""
        return [path for path, data in self._documents.items() if _content(path) != data]

    def write_documents_again(self) -> None:
        for path in self.damaged_documents():
            replace_file(path, self._documents[path])

    def remove(self) -> None:
        """Leave nothing of a run that never began but its logs."""
        shutil.rmtree(self.journal, ignore_errors=True)
        shutil.rmtree(self.tokens, ignore_errors=True)
        for path in (self.run_dir / "config.toml", self.config_json, self._marks):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files. What was not flushed is lost, as in a crash; a resume writes it again."""
        for result in self.results:
            result.close()

    def _write(self, path: Path, data: bytes) -> None:
        self._documents[path] = data
        replace_file(path, data)

    def _read_marks(self) -> list[FileOffsets]:
        try:
            return msgspec.json.decode(self._marks.read_bytes(), type=list[FileOffsets])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            raise NotAsWrittenError(f"{self._marks} does not hold the marks of a run: {error}") from None


def strict_json(values: Any) -> bytes:
    """JSON that any strict reader takes: msgspec writes null for a number that is not finite."""
    try:
        return msgspec.json.encode(values)
    except UnicodeEncodeError:  # a lone surrogate, as in the name of a file that is not UTF-8
        return msgspec.json.encode(without_surrogates(values))


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
