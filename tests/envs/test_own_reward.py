"""A reward by name: what it sees, what it says instead of the environment, and that its failure is never a reward."""

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pearl.config import ConfigError, load
from pearl.envs.own_reward import Attempt, load_reward
from pearl.envs.protocol import EnvironmentSpec, Observation, Split
from pearl.envs.service import EnvironmentService
from pearl.types.config import Config, EnvironmentConfig
from pearl.types.messages.environment import EpisodeFailed, OpenEpisode, StepEpisode, StepEpisodeReply

SEEN: list[Attempt] = []


class TwoTurns:
    """Says 0.25 after the first turn and 0.5 after the second, its last."""

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        return []

    def describe(self) -> EnvironmentSpec:
        return EnvironmentSpec(10, (1,), 0, 0, 4, can_restore=True)

    def episode(self, split: Split, task: int) -> "TwoTurnsEpisode":
        return TwoTurnsEpisode(task)


class TwoTurnsEpisode:
    def __init__(self, task: int) -> None:
        self.secret = task + 100
        self.turns = 0
        self.is_closed = False

    async def reset(self) -> list[int]:
        return [5, 6]

    async def step(self, action: list[int], truncated: bool) -> Observation:
        self.turns += 1
        return Observation([] if self.turns == 2 else [7], 0.25 * self.turns, self.turns == 2)

    async def close(self) -> None:
        self.is_closed = True


def noted(attempt: Attempt) -> float:
    SEEN.append(attempt)
    return 3.0 * attempt.reward


async def waits(attempt: Attempt) -> Any:
    return np.float32(len(attempt.actions))


def raises(attempt: Attempt) -> float:
    raise LookupError("no judge")


def gives_none(attempt: Attempt) -> None: ...


def gives_nan(attempt: Attempt) -> float:
    return math.nan


def takes_two(task: int, attempt: Attempt) -> float:
    return 0.0


async def play(name: str, num_turns: int = 2) -> list[Any]:
    config = Config(environment=EnvironmentConfig(reset_timeout_s=10.0, step_timeout_s=10.0))
    service = EnvironmentService(config, TwoTurns(), reward=load_reward(f"{__name__}:{name}"))
    service.start()
    try:
        await service.handle(OpenEpisode(1, "evaluation", 3))
        action = np.array([4, 1], "<i4").tobytes()
        return [await service.handle(StepEpisode(1, turn, action, turn == 1)) for turn in range(num_turns)]
    finally:
        await service.stop()


async def test_it_sees_the_trajectory_so_far_and_its_answer_counts() -> None:
    SEEN.clear()
    answers = await play("noted")
    assert [(answer.reward, answer.done) for answer in answers] == [(0.75, False), (1.5, True)]
    first, last = SEEN
    assert (first.done, first.truncated, first.reward, len(first.actions)) == (False, False, 0.25, 1)
    assert (last.split, last.task, last.prompt) == ("evaluation", 3, [5, 6])
    assert (last.actions, last.observations) == (([4, 1], [4, 1]), ([7], []))
    assert (last.done, last.truncated, last.reward, last.messages) == (True, True, 0.5, ())
    assert last.episode.secret == 103
    assert last.episode.is_closed, "the environment's own episode is closed with it"


async def test_it_may_be_async() -> None:
    assert [answer.reward for answer in await play("waits")] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", r"LookupError: no judge \(.*test_own_reward.py:\d+\)"),
        (
            "gives_none",
            r'environment.reward = ".*gives_none" returned the reward NoneType: a finite real number',
        ),
        ("gives_nan", r'environment.reward = ".*gives_nan" returned the reward nan'),
    ],
)
async def test_its_failure_fails_the_episode(name: str, reason: str) -> None:
    (answer,) = await play(name, num_turns=1)
    assert isinstance(answer, EpisodeFailed), "which is never a reward"
    assert answer.kind == "error"
    assert re.search(reason, answer.reason)


async def test_without_one_the_environment_s_own_counts() -> None:
    assert load_reward("") is None
    service = EnvironmentService(Config(), TwoTurns())
    service.start()
    try:
        await service.handle(OpenEpisode(1, "train", 0))
        answer = await service.handle(StepEpisode(1, 0, np.array([1], "<i4").tobytes(), False))
    finally:
        await service.stop()
    assert isinstance(answer, StepEpisodeReply)
    assert answer.reward == 0.25


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (f"{__name__}:takes_two", "a reward takes one argument"),
        (f"{__name__}:absent", "has no absent"),
        ("no_such_module:f", "cannot be imported"),
    ],
)
def test_a_wrong_name_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_reward(name)


def test_a_setting_that_names_no_function_is_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("")
    with pytest.raises(ConfigError, match=r'environment.reward: "accuracy" is not "package.module:function"'):
        load(job, ["environment.reward=accuracy"])


def test_the_example_halves_a_mended_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "examples")
    reward = load_reward("own_reward:first_answers")
    assert reward is not None
    attempt = Attempt(
        split="train",
        task=0,
        prompt=[2, 4],
        actions=[[5, 1]],
        observations=[[]],
        truncated=False,
        done=True,
        reward=1.0,
        episode=None,
        messages=(),
    )
    assert reward.function(attempt) == 1.0
    mended = msgspec.structs.replace(attempt, actions=[[9, 1], [5, 1]])
    assert reward.function(mended) == 0.5
