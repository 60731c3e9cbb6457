"""The emulated environment: the same task is the same, siblings differ by what was said, time really passes."""

import asyncio
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.envs.emulated import EmulatedEnvironment
from pearl.envs.emulated.environment import MAX_TOKENS
from pearl.envs.loader import load_environment
from pearl.envs.protocol import Observation
from pearl.types import emulated_tokens

RECORDED = "launch/workloads/swebench_verified_turns.json.gz"


class Slept:
    """Waits for nothing and remembers for how long it should have."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def make(slept: Slept | None = None, **options: Any) -> EmulatedEnvironment:
    return EmulatedEnvironment(sleep=Slept() if slept is None else slept, **options)


def said(seed: int, count: int = 20) -> list[int]:
    ids = np.random.default_rng(seed).integers(2, emulated_tokens.LENGTH_BASE, count)
    return [*ids.tolist(), emulated_tokens.STOP_ID]


async def play(
    environment: EmulatedEnvironment, task: int, member: int
) -> tuple[list[int], list[Observation]]:
    episode = environment.episode("train", task)
    prompt = await episode.reset()
    seen = [await episode.step(said(member), False)]
    while not seen[-1].done:
        seen.append(await episode.step(said(100 * member + len(seen)), False))
    await episode.close()
    return prompt, seen


async def test_the_same_task_and_the_same_answers_give_the_same_again() -> None:
    environment, other = make(), make()
    for task in range(5):
        assert await play(environment, task, 3) == await play(other, task, 3)
    assert await play(make(seed=1), 0, 3) != await play(environment, 0, 3)
    assert environment.describe().can_restore


async def test_a_group_has_one_prompt_and_differs_from_the_first_answer_on() -> None:
    environment = make(num_turns=10, jitter=0.3)
    played = [await play(environment, 4, member) for member in range(16)]
    assert len({tuple(prompt) for prompt, _ in played}) == 1
    assert len({len(seen) for _, seen in played}) > 3, "numbers of turns"
    assert len({len(seen[0].ids) for _, seen in played}) > 3
    assert {seen[-1].reward for _, seen in played} == {0.0, 1.0}, "a reward from which a group can learn"
    assert all(seen[-1].done and not seen[-1].ids for _, seen in played)


async def test_ids_are_content_and_the_last_asks_for_a_length() -> None:
    environment = make(turn_output_tokens=50, spread=0.3)
    size = environment.describe().vocabulary_size
    asked = []
    for task in range(200):
        prompt, seen = await play(environment, task, 1)
        for ids in [prompt] + [observation.ids for observation in seen[:-1]]:
            assert all(
                emulated_tokens.FIRST_CONTENT_ID <= number < emulated_tokens.LENGTH_BASE
                for number in ids[:-1]
            )
            assert emulated_tokens.LENGTH_BASE < ids[-1] < size
            asked.append(ids[-1] - emulated_tokens.LENGTH_BASE)
    assert np.mean(asked) == pytest.approx(50, rel=0.05)
    assert np.std(np.log(asked)) == pytest.approx(0.3, rel=0.1)


async def test_a_profile_has_the_means_that_were_set() -> None:
    slept = Slept()
    environment = make(
        slept, num_turns=6, prompt_tokens=300, turn_input_tokens=80, env_seconds=0.4, spread=0.2
    )
    played = [await play(environment, task, task) for task in range(400)]
    assert np.mean([len(seen) for _, seen in played]) == pytest.approx(6, rel=0.05)
    assert np.mean([len(prompt) for prompt, _ in played]) == pytest.approx(300, rel=0.05)
    observed = [len(observation.ids) for _, seen in played for observation in seen[:-1]]
    assert np.mean(observed) == pytest.approx(80, rel=0.05)
    assert np.mean(slept.seconds) == pytest.approx(0.4, rel=0.1)


async def test_recorded_trajectories_give_their_lengths() -> None:
    environment = make(turns_file=RECORDED, jitter=0.0)
    played = [await play(environment, task, 1) for task in range(100)]
    assert np.mean([len(seen) for _, seen in played]) == pytest.approx(40, rel=0.2)
    assert np.mean([len(prompt) for prompt, _ in played]) == pytest.approx(1930, rel=0.1)
    assert max(len(observation.ids) for _, seen in played for observation in seen) <= MAX_TOKENS


async def test_scales_make_a_workload_quick() -> None:
    slept, slow = Slept(), Slept()
    await play(make(slow, jitter=0.0), 7, 1)
    quick = make(slept, jitter=0.0, time_scale=0.1, token_scale=0.25, turns_file=RECORDED, turn_scale=0.2)
    whole = make(jitter=0.0, turns_file=RECORDED)
    (prompt, seen), (long_prompt, long_seen) = await play(quick, 7, 1), await play(whole, 7, 1)
    assert len(prompt) == pytest.approx(len(long_prompt) / 4, abs=1)
    assert len(seen) == pytest.approx(len(long_seen) / 5, abs=1)
    assert slept.seconds[0] == pytest.approx(slow.seconds[0] / 10)


async def test_hundreds_of_episodes_wait_at_once() -> None:
    num_waiting, everybody = 0, asyncio.Event()

    async def sleep(seconds: float) -> None:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 300:
            everybody.set()
        await everybody.wait()

    environment = EmulatedEnvironment(sleep=sleep, num_turns=3)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for task in range(300):
            group.create_task(play(environment, task, 1))


def test_options_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match=r"environment\.options\.num_turns = 0"):
        load_environment("emulated", {"num_turns": 0})
    with pytest.raises(ValueError, match=r"environment\.options\.env_seconds = -1"):
        load_environment("emulated", {"env_seconds": -1})
    with pytest.raises(ValueError, match="turns_file"):
        load_environment("emulated", {"turns_file": "/no/such/file"})


def test_a_broken_recording_is_refused_by_name(tmp_path: Path) -> None:
    for name, data in (
        ("a.gz", gzip.compress(b'[{"turns": 3}]', mtime=0)),
        ("b.gz", b"plain"),
        ("c.gz", gzip.compress(b"[]", mtime=0)),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"turns_file.*{name}"):
            make(turns_file=str(tmp_path / name))
