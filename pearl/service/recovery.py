"""The state a run begins with: fresh, or as its former life left it on disk."""

from pathlib import Path
from typing import NamedTuple

from pearl.core.coordinator import Coordinator
from pearl.runtime import journal
from pearl.runtime.journal import Journal
from pearl.service import replay
from pearl.service.run_files import RunFiles
from pearl.types import commands
from pearl.types.config import Config

SEGMENT_BYTES = 8 << 20
"""Of the journal: what a resume has to replay at most, a second or two of it."""


class InitialState(NamedTuple):
    core: Coordinator
    journal: Journal
    now: float  # seconds since the run's start
    is_new: bool  # no event has been handled yet


class FinishedError(Exception):
    """The run has ended as wished: there is nothing to resume."""

    def __init__(self, finish: commands.Finish) -> None:
        super().__init__("the run has finished")
        self.finish = finish


def fresh(config: Config, files: RunFiles, segment_bytes: int = SEGMENT_BYTES) -> InitialState:
    """A fresh core with a new journal. ValueError when the directory holds a journal already."""
    core = Coordinator(config)
    files.save_offsets(0, 0.0)
    fresh = Journal.create(files.journal, core.snapshot(), segment_bytes=segment_bytes)
    return InitialState(core, fresh, 0.0, True)


def recover(config: Config, files: RunFiles, segment_bytes: int = SEGMENT_BYTES) -> InitialState:
    """The core after the last journalled event, and the result files as they were meant to be then.

    Raises:
        FinishedError: there is nothing left to do.
        ValueError: this version of PEARL does not follow the journal, or files are missing.
        DamagedError: a file does not hold what was written.
    """
    segment = journal.recover(files.journal)
    core = replay.restore(config, segment)
    now = files.truncate_to_offsets(segment.opening.first_entry).now
    finish: commands.Finish | None = None
    for entry in segment.entries:
        now = entry.now
        finish = _write_again(replay.decode_commands(entry.commands), files) or finish
    files.flush()
    if finish is not None and finish.exit_code == 0:
        raise FinishedError(finish)
    first_entry = segment.opening.first_entry + len(segment.entries)
    files.save_offsets(first_entry, now)
    continued = Journal.open_for_append(files.journal, core.snapshot(), segment_bytes=segment_bytes)
    return InitialState(core, continued, now, first_entry == 0)


def has_journal(files: RunFiles) -> bool:
    """Whether a former life came as far as to have one."""
    return files.journal.is_dir() and any(files.journal.glob("*.msgpack"))


def has_entries(run_dir: Path) -> bool:
    """Whether the run in the directory ever began."""
    return any(path.stat().st_size > 0 for path in run_dir.glob("metrics.jsonl"))


def refuse_without_journal(files: RunFiles) -> None:
    """ValueError when results are there of which no journal tells: going on would make them again, under them."""
    if has_entries(files.run_dir):
        raise ValueError(
            f"{files.journal}: holds no journal, but {files.run_dir} has results of the run; restore it, or begin "
            "again in another directory"
        )


def _write_again(journalled: list[commands.AnyCommand], files: RunFiles) -> commands.Finish | None:
    for command in journalled:
        if isinstance(command, commands.RecordTrajectory):
            files.trajectory(command.record)
        elif isinstance(command, commands.Report):
            files.report(command)
        elif isinstance(command, commands.Finish):
            return command
    return None
