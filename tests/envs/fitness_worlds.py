"""Environments with one fault each, for the check of environments."""

import itertools
import sys
from typing import Any

from pearl.envs.protocol import EnvironmentSpec, Observation, Split

GOOD, END = 3, 1
_calls = itertools.count()


class World:
    """Say 3, then the end."""

    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault

    def describe(self) -> EnvironmentSpec:
        return EnvironmentSpec(
            vocabulary_size=8,
            stop_ids=(END,),
            pad_id=0,
            num_train_tasks=4,
            num_evaluation_tasks=1,
            can_restore=True,
        )

    def episode(self, split: Split, task: int) -> "Episode":
        return Episode(self.fault if task == 1 or split == "evaluation" else "")

    def solve(self, split: Split, task: int) -> list[list[int]]:
        return [[GOOD, END]]

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        return []


class Episode:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    async def reset(self) -> list[int]:
        return [2, next(_calls) % 8] if self.fault == "another prompt" else [2]

    async def close(self) -> None:
        """Nothing is held."""

    async def step(self, action: list[int], truncated: bool) -> Observation:
        if self.fault == "raises":
            raise KeyError("shelf")
        if self.fault == "long":
            return Observation([2] * 300, 0.0, False)
        if self.fault == "random reward":
            return Observation([], next(_calls) * 1e-6, True)
        right = self.fault == "always right" or (action[0] == GOOD and self.fault != "unsolvable")
        return Observation([], float(right), True)


def reward(task: dict[str, Any], answer: str) -> Any:
    """A reward function that does what the answer says."""
    if "raise" in answer:
        raise OSError("the judge is away")
    if "sleep" in answer:
        while True:
            pass
    if "exit" in answer:
        raise SystemExit(3)
    if "fill" in answer:
        return float(len(b"x" * (8 << 30)))
    if "nan" in answer:
        return float("nan")
    sys.stdout.write("written by a reward function\n")
    return {"right": float(task["solution"] in answer), "short": 0.25}


async def slow_reward(task: dict[str, Any], answer: str) -> float:
    return float(answer == task["solution"])
