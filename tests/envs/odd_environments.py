"""An environment whose tasks are kinds of trouble: the task's number says what its episodes do."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from pearl.envs.history import appended_ids
from pearl.envs.protocol import EnvironmentSpec, InfrastructureError, Observation, Split

GOOD, RAISES, HANGS, FLOODS, FOREIGN_ID, NO_INTEGERS, NOT_FINITE, REWRITES = range(8)
BROKEN_TEXT, RAW_BYTES, EXITS, CANCELS, BLOCKS, STUBBORN, HUGE_PROMPT, RESET_FAILS, OTHER_REPLAY = range(
    8, 17
)
RESET_HANGS = 17
VOCABULARY = 257  # bytes and an end token
END = 256
TOOL_OUTPUT = b"\x96\xff\x00" + "a€".encode()


class OddEpisode:
    def __init__(self, environment: "OddEnvironment", task: int) -> None:
        self._environment = environment
        self._task = task
        self._history = [1, 2, 3]

    async def reset(self) -> list[int]:
        if self._task == RESET_FAILS:
            raise InfrastructureError("no sandbox")
        if self._task == RESET_HANGS:
            self._environment.entered.set()
            await self._never()
        return [1] * 5000 if self._task == HUGE_PROMPT else [1, 2, 3]

    async def step(self, action: list[int], truncated: bool) -> Observation:
        self._environment.num_steps += 1
        self._environment.entered.set()
        if self._task in (HANGS, STUBBORN):
            await self._never()
        if self._task == BLOCKS:
            self._environment.gate.wait(30.0)
        self._raise()
        ids = self._ids(action)
        return Observation(ids, float("nan") if self._task == NOT_FINITE else 0.5, action == [7, END])

    def _raise(self) -> None:
        match self._task:
            case 1:  # RAISES
                raise InfrastructureError("the sandbox is gone")
            case 8:  # BROKEN_TEXT
                TOOL_OUTPUT.decode()
            case 10:  # EXITS
                raise SystemExit(3)
            case 11:  # CANCELS
                raise asyncio.CancelledError

    def _ids(self, action: list[int]) -> list[Any]:
        match self._task:
            case 3:  # FLOODS
                return [*range(100), *([9] * 1_000_000), *range(100)]
            case 4:  # FOREIGN_ID
                return [5, VOCABULARY]
            case 5:  # NO_INTEGERS
                return [5, "x" * 1_000_000]
            case 7:  # REWRITES
                return appended_ids([*self._history, *action], self._rendered(action))
            case 9:  # RAW_BYTES
                return list(TOOL_OUTPUT)
            case 16:  # OTHER_REPLAY
                return [self._environment.num_steps]
        return [4, 5]

    def _rendered(self, action: Sequence[int]) -> list[int]:
        """A template that drops the thinking (id 2) of the turns before."""
        return [number for number in self._history if number != 2] + [*action, 9, 9]

    async def _never(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if self._task != STUBBORN or self._environment.released:
                    raise

    async def close(self) -> None:
        self._environment.num_closed += 1


class OddEnvironment:
    def __init__(self, *, cut_id: int | None = None) -> None:
        self._cut_id = cut_id
        self.num_closed = 0
        self.num_steps = 0
        self.released = False
        self.entered = threading.Event()  # a step has begun
        self.gate = threading.Event()  # lets blocking code go on

    def describe(self) -> EnvironmentSpec:
        return EnvironmentSpec(VOCABULARY, (END,), 0, 0, 10, True, self._cut_id)

    def episode(self, split: Split, task: int) -> OddEpisode:
        return OddEpisode(self, task)

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        if first == -2:
            raise ValueError("half a pair: \ud83d")
        if first < 0:
            raise ValueError("no expert")
        return [([1, 2, first + number], [0.0, 0.5, 1.0]) for number in range(count)]
