"""What a run claims at its end, compared with the disk: files may have been deleted, cut or changed meanwhile."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from pearl.runtime.journal import Journal
from pearl.runtime.wal import DamagedError
from pearl.service import recovery
from pearl.service.run_files import RunFiles

log = logging.getLogger(__name__)

CHECKPOINT_DESCRIPTION = "checkpoint.json"


class CheckpointFile(msgspec.Struct, frozen=True):
    name: str
    num_bytes: int


class CheckpointDescription(msgspec.Struct, frozen=True):
    """As far as the coordinator reads it."""

    step: int
    files: tuple[CheckpointFile, ...]


def verify(files: RunFiles, journal: Journal, say: Callable[[str], None]) -> list[str]:
    """Write again what the disk has lost of the results, and return what stays lost, a line each. Never raises for what
    it finds."""
    lost = [f"{damage}: the run can neither be replayed nor resumed"] if (damage := journal.damage()) else []
    damages = [damage for result in files.results if (damage := _damage(result.damage))]
    if damages:
        lost += _repair_results(files, damages, say)
    if damaged := files.damaged_documents():
        names = ", ".join(map(str, damaged))
        try:
            files.write_documents_again()
            say(f"warning: {names}: deleted or changed during the run; written again")
        except OSError as error:
            lost.append(f"{names}: deleted or changed during the run, and not written again: {error}")
    return lost


def checkpoint_damage(root: Path, step: int) -> str:
    """Return what is missing of the checkpoint that the trainer has written of a step; "" = nothing."""
    directory = root / f"step-{step:06d}"
    path = directory / CHECKPOINT_DESCRIPTION
    try:
        description = msgspec.json.decode(path.read_bytes(), type=CheckpointDescription)
        for file in description.files:
            path = directory / file.name
            if (there := path.stat().st_size) != file.num_bytes:
                return f"{path} has {there} bytes, {file.num_bytes} were written"
    except FileNotFoundError:
        return f"{path} was deleted"
    except (OSError, msgspec.DecodeError) as error:
        return f"{path} cannot be read: {error}"
    return ""


def _repair_results(files: RunFiles, damages: list[str], say: Callable[[str], None]) -> list[str]:
    cause = "; ".join(damages)
    written = [(result.size, result.digest) for result in files.results]
    try:
        recovery.write_results_again(files, cause)
    except (OSError, ValueError, DamagedError) as error:
        log.warning("the results are not written again", exc_info=True)
        return [f"{cause}: not written again from the journal: {error}"]
    if [(result.size, result.digest) for result in files.results] != written:
        return [f"{cause}: the journal holds other results than the run had written"]
    say(f"warning: {cause} during the run; written again from the journal")
    return []


def _damage(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except OSError as error:
        return str(error)
