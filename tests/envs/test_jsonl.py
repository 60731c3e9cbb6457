"""Prompts from a file with a reward function: its answers, and all that can go wrong in it."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pearl.cli import main
from pearl.envs.fitness import FitnessOptions, examine
from pearl.envs.jsonl import JsonlEnvironment
from pearl.envs.jsonl.reward_pool import RewardLimits, RewardPool
from pearl.envs.loader import load_environment
from pearl.envs.protocol import EpisodeLimits, InfrastructureError
from pearl.testing.chat_models import make_directory

ROWS = [
    {"prompt": "What is 6 * 7?", "solution": "42"},
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
        "solution": "4",
    },
]
TASK = {"solution": "42"}


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), here))))


def write_rows(tmp_path: Path, rows: list[Any]) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_rewards_and_all_that_is_no_reward() -> None:
    pool = RewardPool("fitness_worlds:reward", RewardLimits(2.0, 2 << 30, 1))
    try:
        assert await pool.score(TASK, "it is 42") == 1.25, "parts are added up"
        for answer, said in [
            ("raise", "OSError: the judge is away"),
            ("nan", "a finite number is needed"),
            ("exit", "SystemExit"),
            ("fill", "MemoryError"),
            ("sleep", "no reward within 2 s"),
        ]:
            with pytest.raises(InfrastructureError, match=said):
                await pool.score(TASK, answer)
        assert await pool.score(TASK, "no") == 0.25, "a new process took over"
    finally:
        await pool.close()


async def test_async_functions_and_processes_beside_each_other() -> None:
    pool = RewardPool("fitness_worlds:slow_reward", RewardLimits(10.0, 2 << 30, 2))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.score(TASK, answer)) for answer in ("42", "41", "42")]
    finally:
        await pool.close()
    assert [task.result() for task in tasks] == [1.0, 0.0, 1.0]


def test_the_environment_is_fit_with_a_real_tokenizer(tmp_path: Path) -> None:
    model = make_directory(tmp_path / "model", "plain")
    options: dict[str, Any] = {"tasks": write_rows(tmp_path, ROWS), "reward": "fitness_worlds:slow_reward"}
    environment = load_environment("jsonl", options, str(model))
    limits = EpisodeLimits(
        max_turns=1, max_context_tokens=512, max_new_tokens_per_turn=64, max_observation_tokens=64
    )
    report = asyncio.run(
        examine("jsonl", environment, environment.describe(), FitnessOptions(2, 0.5, limits))
    )
    assert report.is_fit, report
    assert [task.reference_reward for task in report.tasks] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"question": "?"}], {}, "tasks: task 1 has no prompt"),
        ([{"prompt": [{"role": "cook", "content": "?"}]}], {}, "is not one of system"),
        (ROWS, {"reward": ""}, "environment.options.reward: is missing"),
        (ROWS, {"reward": "fitness_worlds:moon"}, "has no moon"),
        (ROWS, {"reward": "no_such_module:f"}, "cannot be imported"),
        (ROWS, {"reward_timeout_s": 0.0}, "environment.options.reward_timeout_s = 0.0"),
        ([], {}, "there are no tasks"),
    ],
)
def test_mistakes_are_refused_with_their_key(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], said: str
) -> None:
    given = {"tasks": write_rows(tmp_path, rows), "reward": "fitness_worlds:reward", **options}
    with pytest.raises(ValueError, match=said):
        JsonlEnvironment(**given)


def test_the_example_is_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    model = make_directory(tmp_path / "model", "plain")
    assert main(["check-env", "examples/arithmetic.toml", f"model.path={model}", "--tasks", "2"]) == 0
