"""The check of environments: each fault is found, with the task that has it."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from pearl.cli import main
from pearl.envs.bugfix import BugfixEnvironment
from pearl.envs.fitness import FitnessOptions, FitnessReport, examine
from pearl.envs.own_reward import Reward
from pearl.envs.protocol import EpisodeLimits

from fitness_worlds import World  # isort: skip

LIMITS = EpisodeLimits(
    max_turns=6, max_context_tokens=256, max_new_tokens_per_turn=8, max_observation_tokens=64
)


def checked(fault: str, limits: EpisodeLimits = LIMITS) -> FitnessReport:
    environment = World(fault=fault)
    options = FitnessOptions(2, 0.5, limits)
    return asyncio.run(examine("world", environment, environment.describe(), options))


def test_a_fit_environment_is_fit() -> None:
    report = checked("")
    assert report.is_fit
    assert [(task.split, task.task, task.null_reward, task.reference_reward) for task in report.tasks] == [
        ("train", 0, 0.0, 1.0),
        ("train", 1, 0.0, 1.0),
        ("evaluation", 0, 0.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("always right", "an agent that says nothing gets 1, at least the pass mark 0.5"),
        ("unsolvable", "the reference solution gets 0, below the pass mark"),
        ("another prompt", "the same task has another prompt the second time"),
        ("random reward", "the second time (turn 0)"),
        ("raises", "KeyError: 'shelf'"),
        ("long", "environment.max_observation_tokens is 64"),
    ],
)
def test_each_fault_is_said_with_its_task(fault: str, said: str) -> None:
    report = checked(fault)
    assert not report.is_fit
    assert [task.task for task in report.tasks if task.problems] == [1, 0], "train 1 and evaluation 0"
    assert all(any(said in text for text in task.problems) for task in report.tasks if task.problems)


def test_a_reference_that_does_not_fit_the_limits_is_said() -> None:
    tight = EpisodeLimits(
        max_turns=6, max_context_tokens=256, max_new_tokens_per_turn=1, max_observation_tokens=64
    )
    assert any("max_new_tokens_per_turn is 1" in text for text in checked("", tight).tasks[0].problems)


def test_an_own_reward_is_what_is_judged() -> None:
    environment = World(fault="")
    generous = Reward("generous", lambda attempt: max(attempt.reward, 0.75))
    options = FitnessOptions(1, 0.5, LIMITS, reward=generous)
    report = asyncio.run(examine("world", environment, environment.describe(), options))
    assert [(task.null_reward, task.reference_reward) for task in report.tasks] == [(0.75, 1.0)] * 2
    assert "an agent that says nothing gets 0.75" in report.tasks[0].problems[0]


def test_the_built_in_environment_is_fit() -> None:
    environment = BugfixEnvironment()
    options = FitnessOptions(5, 0.5, EpisodeLimits())
    report = asyncio.run(examine("bugfix", environment, environment.describe(), options))
    assert report.is_fit, report
    assert report.num_with_reference == 10


def test_the_command_says_it_with_its_exit_code(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), here))))
    assert main(["check-env", "fitness_worlds:World", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["is_fit"] is True
    assert main(["check-env", "fitness_worlds:World", "fault=unsolvable"]) == 1
    said = capfd.readouterr().out
    assert "problem: train 1: the reference solution gets 0" in said
    assert "is not fit" in said
    assert main(["check-env", "fitness_worlds:Moon"]) == 2
    assert "has no Moon" in capfd.readouterr().err
    assert main(["check-env", "a", "b"]) == 2
