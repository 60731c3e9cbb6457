"""Reads workloads: recorded trajectories (gzipped JSON), a profile, or the ``trajectories.jsonl`` of a run."""

import codecs
import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import msgspec

from pearl.config import ConfigError
from pearl.config.suggestions import nearest
from pearl.core.elastic.profile_file import read_profile
from pearl.sim.workload import (
    EnvLatency,
    Jitter,
    Recording,
    Replayed,
    Resampled,
    Synthetic,
    SyntheticWorkload,
    Workload,
)

SHIPPED = Path(__file__).parents[2] / "launch" / "workloads"
BUILT_IN = {"swebench": "swebench_verified_turns.json.gz"}
MAX_BYTES = 1 << 30
"""Of a file, unpacked: a hundred times the shipped one; what is larger is some other file."""
PROMPT_TOKENS_OF_A_PROFILE = 1024
"""A profile does not tell prompts from observations; the prompt is computed once a group and matters little."""


class RecordedTurn(msgspec.Struct):
    out: int
    obs: int | None = None


class RecordedTrajectory(msgspec.Struct):
    id: str
    prompt0: int
    turns: list[RecordedTurn]


class TrainedTurn(msgspec.Struct):
    new_prompt_tokens: int
    generated_tokens: int
    env_seconds: float


class TrainedTrajectory(msgspec.Struct):
    trajectory: int
    turns: list[TrainedTurn]
    reset_seconds: float = 0.0  # part of the first turn's env_seconds; older runs do not tell it


def load(name: str, seed: int) -> Workload:
    """Load a workload: ``swebench``, a ``.json.gz`` of recorded trajectories, a profile (``.json``), a
    ``trajectories.jsonl`` or a run directory that holds one.

    Raises:
        ConfigError: there is none, or something in it is wrong.
    """
    if name in BUILT_IN:
        return _recorded(name, SHIPPED / BUILT_IN[name], seed)
    path = Path(name)
    if path.is_dir():
        path = path / "trajectories.jsonl"
        if not path.is_file():
            raise ConfigError(f"--workload {name}: is no run directory (it has no trajectories.jsonl)")
    if not path.is_file():
        guess = nearest(name, BUILT_IN)
        hint = f"did you mean {guess}?" if guess else f"built in: {', '.join(BUILT_IN)}"
        raise ConfigError(f'--workload: there is no "{name}"; {hint}, or give a file')
    if path.suffix == ".gz":
        return _recorded(path.stem, path, seed)
    if path.suffix == ".jsonl":
        return _of_run(path, seed)
    return _of_profile(path, seed)


def _recorded(name: str, path: Path, seed: int) -> Workload:
    try:
        with gzip.open(path) as file:
            found = msgspec.json.decode(
                _bounded(path, file.read(MAX_BYTES + 1)), type=list[RecordedTrajectory]
            )
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: holds no recorded trajectories: {error}") from None
    recordings = [_recording(path, trajectory) for trajectory in found if trajectory.turns]
    if not recordings:
        raise ConfigError(f"{path}: holds no trajectory with a turn")
    return Resampled(name, recordings, seed, EnvLatency(), Jitter())


def _bounded(path: Path, data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, which is no workload")
    return data


def _recording(path: Path, trajectory: RecordedTrajectory) -> Recording:
    turns = tuple((max(1, turn.out), turn.obs or 0) for turn in trajectory.turns)
    if trajectory.prompt0 < 1 or any(out < 0 or (obs or 0) < 0 for out, obs in turns):
        raise ConfigError(f"{path}: trajectory {trajectory.id} has negative or no tokens")
    return Recording(trajectory.prompt0, turns)


def _of_profile(path: Path, seed: int) -> Workload:
    try:
        workload = read_profile(path.read_bytes().removeprefix(codecs.BOM_UTF8)).workload
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: is no profile: {error}") from None
    spec = SyntheticWorkload(
        mean_turns=1.0,
        prompt_tokens=PROMPT_TOKENS_OF_A_PROFILE,
        generated_tokens=workload.turn_output_tokens,
        observation_tokens=workload.turn_input_tokens,
        env_seconds=workload.env_seconds / max(1.0, workload.num_turns),
    )
    sigma = math.hypot(spec.task_sigma, spec.member_sigma)
    longest = math.exp(sigma * _expected_maximum(workload.batch_size) - sigma * sigma / 2)
    return Synthetic(path.stem, seed, msgspec.structs.replace(spec, mean_turns=workload.num_turns / longest))


def _expected_maximum(count: float) -> float:
    """Return the expected maximum of that many standard normals, to a few percent: the quantile at (n - 0.375) /
    (n + 0.25)."""
    from statistics import NormalDist

    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _of_run(path: Path, seed: int) -> Workload:
    found = (_trained(f"{path}, line {number}", line) for number, line in _lines(path))
    recordings = dict(pair for pair in found if pair is not None)
    if not recordings:
        raise ConfigError(f"{path}: holds no trained trajectory")
    return Replayed(path.parent.name or path.stem, recordings, seed)


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the lines with their numbers, however the file was saved, without blank ones."""
    with path.open("rb") as file:
        text = _bounded(path, file.read(MAX_BYTES + 1)).removeprefix(codecs.BOM_UTF8)
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append((number, msgspec.json.decode(line, type=dict[str, Any])))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: is no JSON object: {error}") from None
    return found


def _trained(where: str, line: dict[str, Any]) -> tuple[int, Recording] | None:
    if line.get("trained_step") is None or not line.get("turns"):
        return None
    try:
        told = msgspec.convert(line, TrainedTrajectory)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: trajectory {line.get('trajectory')}: {error}") from None
    turns = told.turns
    for turn in turns:
        for name, value in msgspec.structs.asdict(turn).items():
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"{where}: trajectory {told.trajectory}: {name} = {value}: must be 0 or more"
                )
    observed = [turn.new_prompt_tokens for turn in turns[1:]] + [0]
    pairs = tuple((max(1, turn.generated_tokens), obs) for turn, obs in zip(turns, observed, strict=True))
    seconds = [turn.env_seconds for turn in turns]
    if not 0 <= told.reset_seconds <= seconds[0]:
        raise ConfigError(
            f"{where}: trajectory {told.trajectory}: reset_seconds = {told.reset_seconds}: must be from 0 to the "
            f"first turn's env_seconds ({seconds[0]})"
        )
    seconds[0] -= told.reset_seconds
    return told.trajectory, Recording(turns[0].new_prompt_tokens, pairs, tuple(seconds), told.reset_seconds)
