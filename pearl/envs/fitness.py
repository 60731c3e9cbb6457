"""Whether an environment is fit to be trained on: played by an agent that does nothing and by a reference solution.

The first must stay below the pass mark and the second reach it; the same task must be the same again; what it sends
must fit the limits. Each finding names its task.
"""

import asyncio
import resource
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pearl.envs.own_reward import Reward, RewardedEpisode
from pearl.envs.protocol import Environment, EnvironmentSpec, EpisodeLimits, ServingEnvironment, Split
from pearl.envs.response_validator import BadAnswerError, ResponseValidator
from pearl.envs.sandbox_thread import finished
from pearl.runtime.extensions import describe_error
from pearl.types.config import EnvironmentConfig


class FitnessOptions(msgspec.Struct, frozen=True):
    num_tasks: int  # of each split
    pass_mark: float
    limits: EpisodeLimits
    reset_timeout_s: float = EnvironmentConfig().reset_timeout_s
    step_timeout_s: float = EnvironmentConfig().step_timeout_s
    reward: Reward | None = None  # in the place of the environment's own


class Played(msgspec.Struct, frozen=True):
    """One episode. ``observed`` is what the environment said, turn by turn."""

    reward: float
    done: bool
    prompt: list[int]
    observed: list[tuple[list[int], float, bool]]
    num_tokens: int
    seconds: float


class TaskReport(msgspec.Struct):
    split: str
    task: int
    null_reward: float | None = None
    reference_reward: float | None = None  # None: there is no reference solution
    prompt_tokens: int = 0
    largest_observation_tokens: int = 0
    context_tokens: int = 0  # of the longer of the two episodes
    seconds: float = 0.0  # of the slower of the two episodes
    problems: list[str] = []


class FitnessReport(msgspec.Struct):
    name: str
    is_fit: bool
    pass_mark: float
    num_with_reference: int
    seconds_per_episode: float  # mean
    peak_memory_bytes: int  # of this process and of the largest one that it started
    notes: list[str]
    problems: list[str]  # of no one task
    tasks: list[TaskReport]


async def examine(
    name: str, environment: Environment, spec: EnvironmentSpec, options: FitnessOptions
) -> FitnessReport:
    """Play and judge; what the environment raises is a finding."""
    counts: list[tuple[Split, int]] = [
        ("train", spec.num_train_tasks or options.num_tasks),
        ("evaluation", spec.num_evaluation_tasks),
    ]
    examiner = _Examiner(environment, spec, options)
    async with asyncio.TaskGroup() as group:
        serving = (
            group.create_task(environment.serve(), name="serve")
            if isinstance(environment, ServingEnvironment)
            else None
        )
        tasks = [
            await examiner.task(split, task)
            for split, count in counts
            for task in range(min(count, options.num_tasks))
        ]
        if serving is not None:
            serving.cancel()
    problems = _demonstrations(environment, spec, options.limits)
    num_solved = sum(task.reference_reward is not None for task in tasks)
    notes = []
    if (chat := getattr(environment, "describe_chat", None)) is not None:
        notes.append(chat())
    if not num_solved:
        notes.append("no reference solution: whether a task can be solved at all is not known (write solve)")
    if not spec.num_evaluation_tasks:
        notes.append("no evaluation tasks: set environment.num_evaluation_tasks = 0")
    return FitnessReport(
        name=name,
        is_fit=not problems and not any(task.problems for task in tasks),
        pass_mark=options.pass_mark,
        num_with_reference=num_solved,
        seconds_per_episode=sum(task.seconds for task in tasks) / max(1, len(tasks)),
        peak_memory_bytes=1024
        * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
        notes=notes,
        problems=problems,
        tasks=tasks,
    )


class _Examiner:
    def __init__(self, environment: Environment, spec: EnvironmentSpec, options: FitnessOptions) -> None:
        self._environment = environment
        self._spec = spec
        self._options = options
        limits = options.limits
        self._check = ResponseValidator(spec, limits.max_context_tokens, limits.max_observation_tokens)

    async def task(self, split: Split, task: int) -> TaskReport:
        report = TaskReport(split, task, problems=[])
        idle = [list(self._spec.stop_ids[:1])] * self._options.limits.max_turns
        first = await self._tried(report, "an agent that says nothing", split, task, idle)
        if first is not None:
            report.null_reward = first.reward
            self._measure(report, first)
            if first.reward >= self._options.pass_mark:
                report.problems.append(
                    f"an agent that says nothing gets {first.reward:g}, at least the pass mark "
                    f"{self._options.pass_mark:g}"
                )
            again = await self._tried(report, "the same once more", split, task, idle)
            if again is not None:
                report.problems += _differences(first, again)
        await self._solve(report, split, task)
        return report

    async def _solve(self, report: TaskReport, split: Split, task: int) -> None:
        method = getattr(self._environment, "solve", None)
        if method is None:
            return
        try:
            actions = method(split, task)
        except Exception as error:  # noqa: BLE001 - a person's code may raise anything
            report.problems.append(f"solve raised {describe_error(error)}")
            return
        if actions is None:
            return
        limits = self._options.limits
        if len(actions) > limits.max_turns:
            report.problems.append(
                f"the reference solution needs {len(actions)} turns, environment.max_turns is {limits.max_turns}"
            )
        longest = max(map(len, actions), default=0)
        if longest > limits.max_new_tokens_per_turn:
            report.problems.append(
                f"an answer of the reference solution has {longest} tokens, rollout.max_new_tokens_per_turn is "
                f"{limits.max_new_tokens_per_turn}"
            )
        played = await self._tried(report, "the reference solution", split, task, actions)
        if played is None:
            return
        report.reference_reward = played.reward
        self._measure(report, played)
        if played.reward < self._options.pass_mark:
            report.problems.append(
                f"the reference solution gets {played.reward:g}, below the pass mark {self._options.pass_mark:g}"
            )

    def _measure(self, report: TaskReport, played: Played) -> None:
        limits = self._options.limits
        observations = [len(ids) for ids, _, _ in played.observed]
        report.prompt_tokens = len(played.prompt)
        report.largest_observation_tokens = max([report.largest_observation_tokens, *observations])
        report.context_tokens = max(report.context_tokens, played.num_tokens)
        report.seconds = max(report.seconds, played.seconds)
        if played.num_tokens > limits.max_context_tokens:
            report.problems.append(
                f"an episode has {played.num_tokens} tokens, rollout.max_context_tokens is "
                f"{limits.max_context_tokens}"
            )
        if max(observations, default=0) > limits.max_observation_tokens:
            report.problems.append(
                f"an observation has {max(observations)} tokens, environment.max_observation_tokens is "
                f"{limits.max_observation_tokens}: its middle would be cut"
            )

    async def _tried(
        self, report: TaskReport, who: str, split: Split, task: int, actions: Sequence[list[int]]
    ) -> Played | None:
        try:
            return await self._play(split, task, actions)
        except TimeoutError:
            report.problems.append(
                f"{who}: longer than its limit (environment.reset_timeout_s, .step_timeout_s)"
            )
        except BadAnswerError as error:
            report.problems.append(f"{who}: {error}")
        except Exception as error:  # noqa: BLE001 - a person's code may raise anything
            report.problems.append(f"{who}: {describe_error(error)}")
        return None

    async def _play(self, split: Split, task: int, actions: Sequence[list[int]]) -> Played:
        began_s = time.monotonic()
        episode: Any = self._environment.episode(split, task)
        if self._options.reward is not None:
            episode = RewardedEpisode(episode, self._options.reward, split, task)
        observed: list[tuple[list[int], float, bool]] = []
        reward, done = 0.0, False
        try:
            async with asyncio.timeout(self._options.reset_timeout_s):
                prompt = await finished(episode.reset())
            self._check.prompt(prompt)
            num_tokens = len(prompt)
            for action in actions:
                async with asyncio.timeout(self._options.step_timeout_s):
                    seen = await finished(episode.step(list(action), False))
                reward, done = self._check.observation(seen).reward, bool(seen.done)
                observed.append((list(seen.ids), reward, done))
                num_tokens += len(action) + len(seen.ids)
                if done or num_tokens >= self._options.limits.max_context_tokens:
                    break
        finally:
            if (close := getattr(episode, "close", None)) is not None:
                async with asyncio.timeout(self._options.step_timeout_s):
                    await finished(close())
        return Played(reward, done, list(prompt), observed, num_tokens, time.monotonic() - began_s)


def _differences(first: Played, again: Played) -> list[str]:
    if first.prompt != again.prompt:
        return ["the same task has another prompt the second time"]
    for turn, (one, other) in enumerate(zip(first.observed, again.observed, strict=False)):
        if one[0] != other[0]:
            return [f"the same actions are answered otherwise the second time (turn {turn})"]
        if one[1:] != other[1:]:
            return [
                f"the same actions get {one[1]:g} the first and {other[1]:g} the second time (turn {turn})"
            ]
    return [] if len(first.observed) == len(again.observed) else ["the same actions end at another turn"]


def _demonstrations(environment: Environment, spec: EnvironmentSpec, limits: EpisodeLimits) -> list[str]:
    """Say what is wrong with the first demonstrations, where there are any."""
    method = getattr(environment, "demonstrations", None)
    if method is None:
        return []
    check = ResponseValidator(spec, limits.max_context_tokens, limits.max_observation_tokens)
    try:
        made, again = method(0, 0, 4), method(0, 0, 4)
        for ids, weights in made:
            check.demonstration(ids, weights)
    except BadAnswerError as error:
        return [f"demonstrations: {error}"]
    except Exception as error:  # noqa: BLE001 - a person's code may raise anything
        return [f"demonstrations raised {describe_error(error)}"]
    same = [list(ids) for ids, _ in made] == [list(ids) for ids, _ in again]
    return [] if same else ["demonstrations: the same arguments give others the second time"]
