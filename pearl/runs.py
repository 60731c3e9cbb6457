"""Reads what a run left: steps, trajectories, and tokens as arrays. The report of a run is made from the same."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pearl.report.run_data import Line, RunData, read_run
from pearl.runtime.token_store import read_tokens
from pearl.runtime.trajectory_tokens import TrajectoryTokens

__all__ = ["Run", "Tokens", "open"]


class Tokens(NamedTuple):
    """A trajectory's tokens; all arrays have one entry a token."""

    ids: npt.NDArray[np.int32]
    generated: npt.NDArray[np.bool_]  # by the model; else of the prompt or an observation
    logprobs: npt.NDArray[np.float32]  # when they were generated; 0 for the others


class Run:
    """A run directory, of a finished run, a failed one or one that is still going on."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.data: RunData = read_run(run_dir)

    @property
    def steps(self) -> list[Line]:
        """One object a training step, with the keys of metrics.jsonl."""
        return self.data.steps

    @property
    def evaluations(self) -> list[Line]:
        """One object an evaluation round."""
        return self.data.evaluations

    @property
    def trajectories(self) -> list[Line]:
        """One object a finished trajectory, with the keys of trajectories.jsonl."""
        return self.data.trajectories

    @property
    def summary(self) -> Line:
        """The counters of summary.json; empty when the run has not ended."""
        return self.data.summary

    def tokens(self, trajectory: int) -> Tokens:
        """The tokens of the trajectory with this number (``line["trajectory"]``).

        Raises:
            KeyError: the run does not hold them any more: of a long run the newest trajectories' tokens are kept.
        """
        if trajectory not in self._tokens:
            raise KeyError(
                f"{self.run_dir} holds no tokens of trajectory {trajectory}; it holds those of "
                f"{len(self._tokens)} trajectories (see token_trajectories)"
            )
        packed = self._tokens[trajectory]
        return Tokens(
            np.frombuffer(packed.ids, "<i4"),
            np.frombuffer(packed.mask, np.uint8).astype(np.bool_),
            np.frombuffer(packed.logprobs, "<f4"),
        )

    def token_trajectories(self) -> list[int]:
        """The trajectories whose tokens the run still holds."""
        return list(self._tokens)

    @cached_property
    def _tokens(self) -> dict[int, TrajectoryTokens]:
        directory = self.run_dir / "tokens"
        return read_tokens(directory) if directory.is_dir() else {}


def open(run_dir: str | Path) -> Run:
    """Read ``run_dir``.

    Raises:
        FileNotFoundError: it is not a run directory.
    """
    path = Path(run_dir)
    if not path.is_dir() or not any((path / name).exists() for name in ("config.toml", "metrics.jsonl")):
        raise FileNotFoundError(
            f"{path} is not a run directory (it has neither config.toml nor metrics.jsonl)"
        )
    return Run(path)
