"""Checkpoints of an emulated training world: a line of JSON a step, so that restarts and resuming work as always."""

import os
import re
from pathlib import Path

import msgspec

_NAME = re.compile(r"step-(\d{6,})\.json")


class _Checkpoint(msgspec.Struct, frozen=True):
    step: int
    lineage: int


class EmulatedCheckpoints:
    """Of ``ROOT/step-000012.json``; each is complete or absent."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = max(keep, 2)  # whoever asks for a restore may not have heard of the newest one yet

    def steps(self) -> list[int]:
        matches = [_NAME.fullmatch(path.name) for path in self.root.glob("step-*.json")]
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> int | None:
        return max(self.steps(), default=None)

    def verified(self, step: int) -> None:
        """Raises ValueError when there is no good one of that step."""
        path = self._path(step)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Checkpoint)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} is no checkpoint: {error}; there are steps {self.steps()}") from None
        if found.step != step:
            raise ValueError(f"{path} is damaged: it holds step {found.step}")

    def save(self, step: int, lineage: int) -> None:
        """Raises OSError when it cannot be written; then there is none of that step."""
        self.root.mkdir(parents=True, exist_ok=True)
        hidden = self.root / f".writing-{step}"
        with hidden.open("wb") as file:
            file.write(msgspec.json.encode(_Checkpoint(step, lineage)))
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(self._path(step))
        for old in self.steps()[: -self._keep]:
            self._path(old).unlink()

    def discard_after(self, step: int) -> list[int]:
        newer = [found for found in self.steps() if found > step]
        for found in newer:
            self._path(found).unlink()
        return newer

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}.json"
