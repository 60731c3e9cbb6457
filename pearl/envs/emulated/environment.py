"""Episodes that are all lengths and latencies; deterministic by seed, task and what the agent said.

The last id of a prompt or an observation asks for the length of the next answer (``pearl.types.emulated_tokens``). What
was said before is all that tells siblings of a group apart; it decides how they differ, and the reward.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import xxhash

from pearl.envs.emulated.workload import ProfileWorkload, RecordedWorkload, TaskPlan, Workload
from pearl.envs.protocol import EnvironmentSpec, Observation, Split
from pearl.runtime.counter_rng import bits, counter_bits, lognormal, uniform
from pearl.types import emulated_tokens

MAX_TOKENS = 1 << 15
"""Of one prompt or observation; recorded ones reach half a million, which every environment worker would cut."""

Sleep = Callable[[float], Awaitable[None]]


class EmulatedEnvironment:
    def __init__(
        self,
        *,
        seed: int = 0,
        turns_file: str = "",
        num_turns: float = 8.0,
        prompt_tokens: float = 400.0,
        turn_input_tokens: float = 100.0,
        turn_output_tokens: float = 60.0,
        spread: float = 0.5,
        jitter: float = 0.2,
        env_seconds: float = 0.3,
        env_spread: float = 1.0,
        time_scale: float = 1.0,
        token_scale: float = 1.0,
        turn_scale: float = 1.0,
        num_train_tasks: int = 0,
        num_evaluation_tasks: int = 64,
        sleep: Sleep | None = None,
    ) -> None:
        """The keywords are ``environment.options``; ValueError names the one that is out of range.

        ``turns_file`` empty: lengths are lognormal around the means, with ``spread`` from task to task; otherwise
        they are those of recorded trajectories. ``jitter`` is the spread within a group. ``env_seconds`` is the mean
        latency of a turn, lognormal with ``env_spread``. The scales multiply seconds, tokens and turns.
        """
        _check_positive(
            num_turns=num_turns,
            prompt_tokens=prompt_tokens,
            turn_input_tokens=turn_input_tokens,
            turn_output_tokens=turn_output_tokens,
            token_scale=token_scale,
            turn_scale=turn_scale,
        )
        _check_not_negative(
            spread=spread,
            jitter=jitter,
            env_seconds=env_seconds,
            env_spread=env_spread,
            time_scale=time_scale,
            num_train_tasks=num_train_tasks,
            num_evaluation_tasks=num_evaluation_tasks,
        )
        self._workload: Workload = (
            RecordedWorkload(turns_file, turn_scale, token_scale)
            if turns_file
            else ProfileWorkload(
                num_turns * turn_scale,
                prompt_tokens * token_scale,
                turn_input_tokens * token_scale,
                turn_output_tokens * token_scale,
                spread,
            )
        )
        self._seed = seed
        self._jitter = jitter
        self._env_seconds = env_seconds * time_scale
        self._env_spread = env_spread
        self._num_train_tasks = num_train_tasks
        self._num_evaluation_tasks = num_evaluation_tasks
        self._sleep: Sleep = asyncio.sleep if sleep is None else sleep

    def describe(self) -> EnvironmentSpec:
        return EnvironmentSpec(
            vocabulary_size=emulated_tokens.VOCABULARY_SIZE,
            stop_ids=(emulated_tokens.STOP_ID,),
            pad_id=emulated_tokens.PAD_ID,
            num_train_tasks=self._num_train_tasks,
            num_evaluation_tasks=self._num_evaluation_tasks,
            can_restore=True,
        )

    def episode(self, split: Split, task: int) -> "EmulatedEpisode":
        key = bits(self._seed, split == "train", task)
        plan = self._workload.plan(key)
        return EmulatedEpisode(plan, key, self._jitter, self._latency, self._sleep)

    def _latency(self, key: int) -> float:
        return lognormal(self._env_seconds, self._env_spread, key)

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        """Return no demonstrations."""
        return []


def _check_positive(**options: float) -> None:
    for key, value in options.items():
        if not 0.0 < value < 1e6:
            raise ValueError(f"environment.options.{key} = {value}: must be greater than 0, below 1000000")


def _check_not_negative(**options: float) -> None:
    for key, value in options.items():
        if not 0.0 <= value < 1e9:
            raise ValueError(f"environment.options.{key} = {value}: must not be negative or huge")


class EmulatedEpisode:
    def __init__(
        self, plan: TaskPlan, key: int, jitter: float, latency: Callable[[int], float], sleep: Sleep
    ) -> None:
        self._plan = plan
        self._key = key
        self._jitter = jitter
        self._latency = latency
        self._sleep = sleep
        self._history = key  # of all that was said so far
        self._turn = 0
        self._num_turns = len(plan.output_tokens)

    async def reset(self) -> list[int]:
        await self._sleep(self._latency(bits(self._key, 1)))
        return self._ids(self._plan.prompt_tokens, 0)

    async def step(self, action: list[int], truncated: bool) -> Observation:
        self._history = xxhash.xxh3_64_intdigest(np.array(action, "<i4").tobytes(), self._history)
        if self._turn == 0:
            # The first answer is what siblings differ in, so it decides how many turns this one has.
            self._num_turns = max(1, round(self._jittered(self._num_turns, 2)))
        self._turn += 1
        await self._sleep(self._latency(bits(self._history, 3)))
        if self._turn >= self._num_turns:
            is_solved = uniform(self._history, 4) < uniform(self._key, 5)
            return Observation([], float(is_solved), True)
        wanted = self._plan.observation_tokens[self._place(self._turn - 1)]
        return Observation(self._ids(round(self._jittered(wanted, 6)), self._turn), 0.0, False)

    async def close(self) -> None:
        """Holds nothing."""

    def _jittered(self, mean: float, what: int) -> float:
        return lognormal(mean, self._jitter, self._history, what)

    def _place(self, turn: int) -> int:
        """An episode that has more turns than its task's plan goes through the plan again."""
        return turn % len(self._plan.output_tokens)

    def _ids(self, num_tokens: int, turn: int) -> list[int]:
        """Make so many ids, the last of which asks for the turn's answer."""
        count = min(max(num_tokens, 1), MAX_TOKENS) - 1
        drawn = counter_bits(np.uint64(bits(self._history, 7)), np.arange(count))
        drawn %= np.uint64(emulated_tokens.LENGTH_BASE - emulated_tokens.FIRST_CONTENT_ID)
        content: list[int] = (drawn + np.uint64(emulated_tokens.FIRST_CONTENT_ID)).tolist()
        return [*content, emulated_tokens.length_id(self._plan.output_tokens[self._place(turn)])]
