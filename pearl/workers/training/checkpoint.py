"""Checkpoints on disk: ``ROOT/step-000012/`` holds whole tensors, so that any number of ranks can load it.

A step's directory is complete or absent: everything is written and synced under a hidden name, the description
with every file's size and digest comes last, then one rename. A process killed at any moment leaves the last good
one as it was. One rank writes; all ranks read, so with several hosts ROOT lies on storage that all of them see.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pearl.workers.disk_space import require_space

log = logging.getLogger(__name__)

DESCRIPTION = "checkpoint.json"
STEP_NAME = re.compile(r"step-(\d{6,})")
OS_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")
HASH_BYTES = 8 << 20
KEEP_AT_LEAST = 2
"""Whoever asks for a restore may not have heard of the newest one yet."""


class FileRecord(msgspec.Struct, frozen=True):
    name: str
    num_bytes: int
    digest: str  # xxh3-128, hex


class Description(msgspec.Struct, frozen=True):
    """``step`` is the number of training steps done: the step of the weight version it holds."""

    step: int
    lineage: int
    config_digest: str
    files: tuple[FileRecord, ...]


class Checkpoint:
    """A complete one, read-only. ``parts`` are the names given to ``CheckpointWriter.add``."""

    def __init__(self, directory: Path, description: Description) -> None:
        self.description = description
        self._directory = directory

    def reader(self, part: str) -> "PartReader":
        return PartReader(self._directory / f"{part}.safetensors")

    def parts(self) -> set[str]:
        return {Path(record.name).stem for record in self.description.files}


class PartReader:
    """Reads tensors one by one; the file is mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt", device="cpu")  # it has no type information

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def names(self) -> set[str]:
        return set(self._file.keys())

    def __call__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


class CheckpointWriter:
    """Writes one step's parts; nothing is visible before ``commit``."""

    def __init__(self, root: Path, step: int, num_bytes: int = 0) -> None:
        """``num_bytes``: of all parts to come. Raises NoSpaceError when there is no room for them."""
        self._root = root
        self._step = step
        self._files: list[FileRecord] = []
        self._directory = root / f".writing-{step:06d}"
        _remove(self._directory)
        root.mkdir(parents=True, exist_ok=True)
        require_space(root, num_bytes)
        self._directory.mkdir()

    def add(self, part: str, tensors: Mapping[str, torch.Tensor]) -> None:
        path = self._directory / f"{part}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except SafetensorError as error:
            raise _as_os_error(error, path) from error
        _sync(path)
        self._files.append(FileRecord(path.name, path.stat().st_size, _digest(path)))

    def commit(self, lineage: int, config_digest: str) -> None:
        description = Description(self._step, lineage, config_digest, tuple(self._files))
        path = self._directory / DESCRIPTION
        path.write_bytes(msgspec.json.format(msgspec.json.encode(description)))
        _sync(path)
        _sync(self._directory)
        final = self._root / f"step-{self._step:06d}"
        _remove(final)  # incomplete, or of a future that a restore discarded
        self._directory.rename(final)
        _sync(self._root)


class CheckpointStore:
    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = max(keep, KEEP_AT_LEAST)

    def writer(self, step: int, num_bytes: int = 0) -> CheckpointWriter:
        return CheckpointWriter(self.root, step, num_bytes)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        found = [STEP_NAME.fullmatch(path.name) for path in self.root.glob("step-*")]
        return sorted(
            step for match in found if match for step in [int(match[1])] if self._open(step) is not None
        )

    def open(self, step: int) -> Checkpoint:
        """Raises ValueError when there is no complete checkpoint of that step."""
        checkpoint = self._open(step)
        if checkpoint is None:
            raise ValueError(
                f"{self._path(step)} is not a complete checkpoint; complete are steps {self.steps() or 'none'}"
            )
        return checkpoint

    def verified(self, step: int) -> Checkpoint:
        """Open a checkpoint after reading every byte and comparing it with its digest. Raises ValueError."""
        checkpoint = self.open(step)
        for record in checkpoint.description.files:
            if _digest(self._path(step) / record.name) != record.digest:
                raise ValueError(
                    f"{self._path(step) / record.name} is damaged: its digest is not the one it was written with; "
                    f"restore from another step of {self.steps()}"
                )
        return checkpoint

    def newest(self) -> int | None:
        """The newest complete and undamaged step."""
        for step in reversed(self.steps()):
            try:
                self.verified(step)
            except ValueError as error:
                log.error("checkpoint passed over: %s", error)
            else:
                return step
        return None

    def prune(self) -> None:
        """Remove all but the newest ``keep`` and what a killed writer left."""
        for step in self.steps()[: -self._keep]:
            _remove(self._path(step))
        for path in self.root.glob(".*"):
            _remove(path)

    def discard_after(self, step: int) -> list[int]:
        """Remove checkpoints newer than ``step``: a restore made their steps things that never happened."""
        newer = [found for found in self.steps() if found > step]
        for found in newer:
            _remove(self._path(found))
        return newer

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def _open(self, step: int) -> Checkpoint | None:
        try:
            description = msgspec.json.decode((self._path(step) / DESCRIPTION).read_bytes(), type=Description)
            sizes = [(self._path(step) / record.name).stat().st_size for record in description.files]
        except (OSError, msgspec.DecodeError):
            return None
        whole = sizes == [record.num_bytes for record in description.files] and description.step == step
        return Checkpoint(self._path(step), description) if whole else None


def _remove(directory: Path) -> None:
    """A half-removed directory must not look complete: it loses its visible name first."""
    if not directory.exists():
        return
    if not directory.name.startswith("."):
        hidden = directory.with_name(f".removing-{directory.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
        directory = hidden
    shutil.rmtree(directory)


def _as_os_error(error: SafetensorError, path: Path) -> OSError:
    """Return what the system said: safetensors hands on its error as text only."""
    found = OS_ERROR_NUMBER.search(str(error))
    return OSError(int(found[1]) if found else errno.EIO, str(error), str(path))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()
