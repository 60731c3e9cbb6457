"""The state a run begins with: fresh, or as its former life left it on disk."""

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from pearl.config import resolved_json
from pearl.core.coordinator import Coordinator
from pearl.runtime import journal
from pearl.runtime.journal import Journal
from pearl.service import replay
from pearl.service.own_router import load_router
from pearl.service.run_files import NotAsWrittenError, RunFiles
from pearl.types import commands
from pearl.types.config import Config

SEGMENT_BYTES = 8 << 20
"""Of the journal: what a resume has to replay at most, a second or two of it."""
MAY_CHANGE = ("runtime",)
"""Sections of which a resume takes new values: how processes are watched and reached, not what is trained."""

log = logging.getLogger(__name__)


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
    core = Coordinator(config, router=load_router(config))
    files.save_offsets(0, 0.0)
    fresh = Journal.create(
        files.journal, core.snapshot(), segment_bytes=segment_bytes, settings=resolved_json(config).encode()
    )
    return InitialState(core, fresh, 0.0, True)


def recover(config: Config, files: RunFiles, segment_bytes: int = SEGMENT_BYTES) -> InitialState:
    """The core after the last journalled event, and the result files as they were meant to be then.

    Raises:
        FinishedError: there is nothing left to do.
        ValueError: this version of PEARL does not follow the journal, or files are missing.
        DamagedError: a file does not hold what was written.
    """
    segment = journal.recover(files.journal)
    refuse_other_settings(config, segment.opening.settings, files.run_dir)
    core = replay.restore(config, segment)
    finish: commands.Finish | None = None
    try:
        now = files.truncate_to_offsets(segment.opening.first_entry).now
    except NotAsWrittenError as error:
        log.warning("%s; the results are written again from the journal", error)
        now, finish = write_results_again(files, str(error))
    else:
        for entry in segment.entries:
            now = entry.now
            finish = _write_again(replay.decode_commands(entry.commands), files) or finish
    files.flush()
    if finish is not None and finish.exit_code == 0:
        raise FinishedError(finish)
    first_entry = segment.opening.first_entry + len(segment.entries)
    files.save_offsets(first_entry, now)
    continued = Journal.open_for_append(
        files.journal, core.snapshot(), segment_bytes=segment_bytes, settings=resolved_json(config).encode()
    )
    return InitialState(core, continued, now, first_entry == 0)


def refuse_other_settings(config: Config, journalled: bytes, run_dir: Path) -> None:
    """ValueError that names every setting which is not the one that the run was started with."""
    if not journalled:
        return
    started, defaults = msgspec.json.decode(journalled), msgspec.to_builtins(Config())
    wrong = [
        f"{run_dir / 'config.toml'}: {name}.{key} = {_show(value)}, but the run was started with "
        f"{_show(started.get(name, {}).get(key, defaults[name][key]))}"
        for name, section in msgspec.json.decode(msgspec.json.encode(config)).items()
        if name not in MAY_CHANGE
        for key, value in section.items()
        if value != started.get(name, {}).get(key, defaults[name][key])
    ]
    if wrong:
        raise ValueError(
            "\n".join([*wrong, "put back what it was started with, or begin another run in a new directory"])
        )


def write_results_again(files: RunFiles, cause: str) -> tuple[float, commands.Finish | None]:
    """Write both result files anew from the whole journal. Returns the time of its last entry, and the Finish of its
    newest segment.

    Raises:
        NotAsWrittenError: the journal does not reach back to the beginning of the run; says ``cause``.
        DamagedError: the journal itself does not hold what was written.
    """
    now, finish = 0.0, None
    for number, segment in enumerate(journal.read(files.journal)):
        if number == 0:
            if segment.opening.first_entry:
                raise NotAsWrittenError(
                    f"{cause}; {files.journal} begins at entry {segment.opening.first_entry}, so it cannot be "
                    "written again: restore the file, or begin another run in a new directory"
                )
            for result in files.results:
                result.reset_tokens()
        finish = None
        for entry in segment.entries:
            now = entry.now
            finish = _write_again(replay.decode_commands(entry.commands), files) or finish
        files.flush()
    for result in files.results:
        result.put_in_place()
    return now, finish


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


def _show(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _write_again(journalled: list[commands.AnyCommand], files: RunFiles) -> commands.Finish | None:
    for command in journalled:
        if isinstance(command, commands.RecordTrajectory):
            files.trajectory(command.record)
        elif isinstance(command, commands.Report):
            files.report(command)
        elif isinstance(command, commands.Finish):
            return command
    return None
