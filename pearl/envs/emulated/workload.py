"""How long everything in a task is: drawn around given means, or taken from recorded trajectories."""

import gzip
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

import pearl
from pearl.runtime.counter_rng import bits, lognormal


class TaskPlan(NamedTuple):
    """Of one task, before the jitter of each of its episodes."""

    prompt_tokens: int
    output_tokens: tuple[int, ...]  # a turn
    observation_tokens: tuple[int, ...]  # a turn


class Workload(Protocol):
    def plan(self, key: int) -> TaskPlan: ...


class ProfileWorkload:
    def __init__(
        self, num_turns: float, prompt_tokens: float, input_tokens: float, output_tokens: float, spread: float
    ) -> None:
        self._num_turns = num_turns
        self._prompt_tokens = prompt_tokens
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        self._spread = spread

    def plan(self, key: int) -> TaskPlan:
        def draw(mean: float, *keys: int) -> int:
            return max(1, round(lognormal(mean, self._spread, key, *keys)))

        turns = range(draw(self._num_turns, 0))
        return TaskPlan(
            draw(self._prompt_tokens, 1),
            tuple(draw(self._output_tokens, 2, turn) for turn in turns),
            tuple(draw(self._input_tokens, 3, turn) for turn in turns),
        )


class _Turn(msgspec.Struct, frozen=True):
    out: int
    obs: int


class _Trajectory(msgspec.Struct, frozen=True):
    prompt0: int
    turns: tuple[_Turn, ...]


class RecordedWorkload:
    """Recorded trajectories: gzipped JSON, a list of ``{"prompt0", "turns": [{"out", "obs"}, ...]}``."""

    def __init__(self, path: str, turn_scale: float, token_scale: float) -> None:
        found = _find(path)
        try:
            rows = msgspec.json.decode(gzip.decompress(found.read_bytes()), type=list[_Trajectory])
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise ValueError(f"environment.options.turns_file: {found} cannot be read: {error}") from None
        self._rows = [row for row in rows if row.turns]
        if not self._rows:
            raise ValueError(f"environment.options.turns_file: {found} has no trajectory with a turn")
        self._turn_scale = turn_scale
        self._token_scale = token_scale

    def plan(self, key: int) -> TaskPlan:
        row = self._rows[bits(key) % len(self._rows)]
        turns = row.turns[: max(1, round(len(row.turns) * self._turn_scale))]

        def scaled(tokens: int) -> int:
            return max(1, round(tokens * self._token_scale))

        return TaskPlan(
            scaled(row.prompt0),
            tuple(scaled(turn.out) for turn in turns),
            tuple(scaled(turn.obs) for turn in turns),
        )


def _find(path: str) -> Path:
    """Find the file as given, or beside the package: what ships with it is found from any directory."""
    beside = Path(pearl.__file__).resolve().parent.parent / path
    return beside if not Path(path).exists() and beside.exists() else Path(path)
