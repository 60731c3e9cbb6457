"""Scripts of trajectories: their prompts, turns, and how long their environments take.

A trajectory's script depends on the seed, the workload and its own number only: every policy meets the same work, and
a trajectory that starts again meets its own again.
"""

import math
import random
from typing import Protocol

import msgspec

from pearl.sim.random_streams import lognormal_mean_one, stream


class ScriptedTurn(msgspec.Struct, frozen=True, array_like=True):
    generated_tokens: int  # at least 1
    observation_tokens: int
    env_seconds: float


class Script(msgspec.Struct, frozen=True):
    """One trajectory to its natural end; limits of length and turns are the core's business."""

    prompt_tokens: int
    reset_seconds: float
    turns: tuple[ScriptedTurn, ...]


class Workload(Protocol):
    @property
    def name(self) -> str: ...

    def script(self, task: int, trajectory: int) -> Script:
        """Return the script of a member of the task's group."""
        ...


class EnvLatency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of an environment's turn: most commands are quick; some (a test run) take long."""

    quick_median: float = 0.35
    quick_sigma: float = 0.6
    slow_share: float = 0.19
    slow_median: float = 13.0
    slow_sigma: float = 0.9
    reset: float = 5.0

    def draw(self, rng: random.Random) -> float:
        if rng.random() < self.slow_share:
            return self.slow_median * math.exp(rng.gauss(0.0, self.slow_sigma))
        return self.quick_median * math.exp(rng.gauss(0.0, self.quick_sigma))

    @property
    def mean(self) -> float:
        quick = self.quick_median * math.exp(self.quick_sigma**2 / 2)
        slow = self.slow_median * math.exp(self.slow_sigma**2 / 2)
        return quick + self.slow_share * (slow - quick)


class Jitter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much members of one group differ."""

    rank: float = (
        0.3  # sigma of a member's place among all recordings by length, where 0 is shortest and 1 longest
    )
    tokens: float = (
        0.2  # sigma of a lognormal factor with mean 1 on each turn's generated and observed tokens
    )


class Recording(msgspec.Struct, frozen=True):
    """A real trajectory: (generated, observed) tokens a turn, and its environment's seconds a turn where known."""

    prompt_tokens: int
    turns: tuple[tuple[int, int], ...]
    env_seconds: tuple[float, ...] = ()
    reset_seconds: float = 0.0


class Resampled:
    """Resamples recordings: a task has a place among them by length, its group's members are recordings from
    around it.

    Over all tasks every recording is as frequent as any other, while the members of a group resemble each other.
    """

    def __init__(
        self, name: str, recordings: list[Recording], seed: int, latency: EnvLatency, jitter: Jitter
    ) -> None:
        assert recordings
        self._name = name
        self._recordings = sorted(recordings, key=lambda recording: len(recording.turns))
        self._seed = seed
        self._latency = latency
        self._jitter = jitter

    @property
    def name(self) -> str:
        return self._name

    def script(self, task: int, trajectory: int) -> Script:
        place = stream(self._seed, "task", task).random()
        rng = stream(self._seed, "trajectory", trajectory)
        recording = self._at(place + rng.gauss(0.0, self._jitter.rank))
        turns = tuple(self._turn(out, obs, rng) for out, obs in recording.turns)
        return Script(self._at(place).prompt_tokens, self._latency.reset, turns)

    def _at(self, place: float) -> Recording:
        """Return the recording at a place; places beyond an end are mirrored, so that all stay equally frequent."""
        place %= 2.0
        place = 2.0 - place if place > 1.0 else place
        count = len(self._recordings)
        return self._recordings[min(int(place * count), count - 1)]

    def _turn(self, generated: int, observed: int, rng: random.Random) -> ScriptedTurn:
        sigma = self._jitter.tokens
        return ScriptedTurn(
            max(1, round(generated * lognormal_mean_one(rng, sigma))),
            round(observed * lognormal_mean_one(rng, sigma)),
            self._latency.draw(rng),
        )


class Replayed:
    """Replays the trajectories of a run, each as it was; further ones are drawn from them."""

    def __init__(self, name: str, recordings: dict[int, Recording], seed: int) -> None:
        assert recordings
        self._name = name
        self._recordings = recordings
        self._known = list(recordings.values())
        self._seed = seed

    @property
    def name(self) -> str:
        return self._name

    def script(self, task: int, trajectory: int) -> Script:
        recording = self._recordings.get(trajectory)
        if recording is None:
            recording = stream(self._seed, "trajectory", trajectory).choice(self._known)
        turns = zip(recording.turns, recording.env_seconds, strict=True)
        scripted = tuple(ScriptedTurn(out, obs, seconds) for (out, obs), seconds in turns)
        return Script(recording.prompt_tokens, recording.reset_seconds, scripted)


class Synthetic:
    """Draws from a profile's means: lognormal turns and tokens, ``num_turns`` being the expected longest of a
    batch."""

    def __init__(self, name: str, seed: int, workload: "SyntheticWorkload") -> None:
        self._name = name
        self._seed = seed
        self._spec = workload

    @property
    def name(self) -> str:
        return self._name

    def script(self, task: int, trajectory: int) -> Script:
        spec = self._spec
        difficulty = lognormal_mean_one(stream(self._seed, "task", task), spec.task_sigma)
        rng = stream(self._seed, "trajectory", trajectory)
        count = max(1, round(spec.mean_turns * difficulty * lognormal_mean_one(rng, spec.member_sigma)))
        return Script(round(spec.prompt_tokens), 0.0, tuple(self._turn(rng) for _ in range(count)))

    def _turn(self, rng: random.Random) -> ScriptedTurn:
        spec = self._spec
        return ScriptedTurn(
            max(1, round(spec.generated_tokens * lognormal_mean_one(rng, spec.token_sigma))),
            round(spec.observation_tokens * lognormal_mean_one(rng, spec.token_sigma)),
            spec.env_seconds * lognormal_mean_one(rng, spec.env_sigma),
        )


class SyntheticWorkload(msgspec.Struct, frozen=True, kw_only=True):
    mean_turns: float
    prompt_tokens: float
    generated_tokens: float  # a turn
    observation_tokens: float
    env_seconds: float  # a turn
    task_sigma: float = 0.3  # between tasks
    member_sigma: float = 0.3  # within a group
    token_sigma: float = 0.7
    env_sigma: float = 1.0
