"""Environments as people write them at first: plain methods, nothing to close, no expert, mistakes of every kind."""

import logging
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.envs import check
from pearl.envs.loader import check_demonstrations, describe, load_environment
from pearl.envs.protocol import EnvironmentSpec, Observation
from pearl.envs.service import EnvironmentService
from pearl.types.config import Config, EnvironmentConfig
from pearl.types.messages.environment import (
    CloseEpisode,
    Demonstrate,
    DemonstrateReply,
    EpisodeFailed,
    OpenEpisode,
    OpenEpisodeReply,
    StepEpisode,
    StepEpisodeReply,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SPEC = EnvironmentSpec(
    vocabulary_size=10,
    stop_ids=(1,),
    pad_id=0,
    num_train_tasks=0,
    num_evaluation_tasks=1,
    can_restore=True,
)


class PlainEpisode:
    """Neither async nor with a ``close``."""

    def __init__(self, prompt: Any, reward: float) -> None:
        self._prompt = prompt
        self._reward = reward

    def reset(self) -> Any:
        return self._prompt

    def step(self, action: list[int], truncated: bool) -> Observation:
        return Observation([], 1.0 / self._reward, True)


class PlainEnvironment:
    """Without demonstrations."""

    def __init__(self, *, prompt: Any = (2, 3), reward: float = 1.0) -> None:
        self._prompt = list(prompt) if isinstance(prompt, tuple) else prompt
        self._reward = reward

    def describe(self) -> Any:
        return SPEC

    def episode(self, split: str, task: int) -> Any:
        return PlainEpisode(self._prompt, self._reward)


class AsyncDescription(PlainEnvironment):
    async def describe(self) -> Any:
        return SPEC


class WrongDescription(PlainEnvironment):
    def describe(self) -> Any:
        return {"vocabulary_size": 10}


class EmptyDemonstrations(PlainEnvironment):
    def demonstrations(self, seed: int, first: int, count: int) -> list[Any]:
        return []


def service_of(environment: Any) -> EnvironmentService:
    config = Config(environment=EnvironmentConfig(reset_timeout_s=10.0, step_timeout_s=10.0))
    service = EnvironmentService(config, environment)
    service.start()
    return service


async def first_step(service: EnvironmentService) -> Any:
    await service.handle(OpenEpisode(1, "train", 0))
    return await service.handle(StepEpisode(1, 0, np.array([4, 1], "<i4").tobytes(), False))


async def test_plain_methods_without_close_and_demonstrations_are_enough() -> None:
    service = service_of(PlainEnvironment())
    try:
        opened = await service.handle(OpenEpisode(1, "train", 0))
        assert isinstance(opened, OpenEpisodeReply)
        stepped = await service.handle(StepEpisode(1, 0, np.array([4, 1], "<i4").tobytes(), False))
        assert isinstance(stepped, StepEpisodeReply)
        assert (stepped.reward, stepped.done) == (1.0, True)
        assert await service.handle(CloseEpisode(1)) is None
        assert await service.handle(Demonstrate(0, 0, 4)) == DemonstrateReply(())
    finally:
        await service.stop()


async def test_what_raises_is_said_with_the_line_of_its_author_and_logged_once_in_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = service_of(PlainEnvironment(reward=0.0))
    try:
        with caplog.at_level(logging.INFO):
            failed = await first_step(service)
            again = await first_step(service)
    finally:
        await service.stop()
    assert isinstance(failed, EpisodeFailed)
    assert failed == again
    assert failed.reason.startswith("step: ZeroDivisionError: float division by zero (")
    assert f"{Path(__file__).name}:" in failed.reason
    tracebacks = [record.message for record in caplog.records if "Traceback" in record.message]
    assert len(tracebacks) == 1
    assert "1.0 / self._reward" in tracebacks[0]
    assert "code_thread.py" not in tracebacks[0], "PEARL's own frames say nothing to its reader"


async def test_a_batch_encoding_as_prompt_is_refused_with_the_argument_that_avoids_it() -> None:
    service = service_of(PlainEnvironment(prompt=UserDict(input_ids=[1, 2])))
    try:
        failed = await service.handle(OpenEpisode(1, "train", 0))
    finally:
        await service.stop()
    assert isinstance(failed, EpisodeFailed)
    assert "return_dict=False" in failed.reason


def test_an_async_description_is_refused_with_file_and_line() -> None:
    with pytest.raises(ValueError, match=r"describe is async \(.*test_own_environments.py:\d+\)"):
        load_environment(f"{__name__}:AsyncDescription", {})


def test_a_description_of_another_type_is_refused_with_file_and_line() -> None:
    environment = load_environment(f"{__name__}:WrongDescription", {})
    with pytest.raises(ValueError, match=r"describe returned dict.*test_own_environments.py:\d+"):
        describe("own", environment)


@pytest.mark.parametrize("name", ["PlainEnvironment", "EmptyDemonstrations"])
def test_a_warm_start_without_demonstrations_is_refused_with_the_way_out(name: str) -> None:
    environment = load_environment(f"{__name__}:{name}", {})
    with pytest.raises(ValueError, match=r"warm_start.num_steps = 150.*set warm_start.num_steps = 0"):
        check_demonstrations(name, environment, 150)


def test_the_check_plays_the_example(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert check.main(["own_environment:NextDigit", "num_digits=3", "--episodes", "1"]) == 0
    out = capfd.readouterr().out
    assert "vocabulary_size=14" in out
    assert "task 0: prompt [2, 4]" in out


def test_the_check_of_code_that_raises_shows_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main([f"{__name__}:PlainEnvironment", "reward=0.0", "--episodes", "1"]) == 2
    out = capfd.readouterr().out
    assert "ZeroDivisionError" in out
    assert "1.0 / self._reward" in out


def test_the_example_is_as_short_as_its_page_says() -> None:
    assert len((EXAMPLES / "own_environment.py").read_text().splitlines()) <= 40
