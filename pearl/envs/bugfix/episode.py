"""One repair. The prompt shows the program, not what it should be: only TEST tells where it fails, only VIEW what is
needed there, so an edit without a look is a guess.

The reward is 1 when SUBMIT comes with the program right, 0 in every other case; an episode that ends for want of
turns was not submitted. A malformed action costs its turn and is answered with "error".
"""

from collections.abc import Sequence

from pearl.envs.bugfix import tokenizer as words
from pearl.envs.bugfix.actions import Action, Edit, Submit, Test, View, parse
from pearl.envs.bugfix.task import Shape, Task
from pearl.envs.protocol import Observation


class Repair:
    """The rules, without waiting: deterministic in the task and the actions."""

    def __init__(self, task: Task, shape: Shape) -> None:
        self._task = task
        self._shape = shape
        self.program = list(task.broken)
        self.is_done = False

    @property
    def is_fixed(self) -> bool:
        return tuple(self.program) == self._task.fixed

    def prompt(self) -> list[int]:
        return [words.TASK, *words.symbols(self._task.broken), words.AGENT]

    def act(self, ids: Sequence[int]) -> Observation:
        """ValueError when the episode has ended."""
        if self.is_done:
            raise ValueError("the episode has ended: nothing can be done after SUBMIT")
        action = parse(ids, self._shape)
        if isinstance(action, Submit):
            self.is_done = True
            return Observation([], float(self.is_fixed), True)
        return Observation([words.TOOL, *self._answer(action), words.AGENT], 0.0, False)

    def _answer(self, action: Action | None) -> list[int]:
        match action:
            case Test():
                return self._first_failure()
            case View(line):
                return [words.NEEDS, words.FIRST_SYMBOL + self._task.fixed[line]]
            case Edit(line, symbol):
                self.program[line] = symbol
                return [words.DONE]
            case _:
                return [words.ERROR]

    def _first_failure(self) -> list[int]:
        for line, (has, needs) in enumerate(zip(self.program, self._task.fixed, strict=True)):
            if has != needs:
                return [words.FAIL, words.FIRST_LINE + line]
        return [words.PASS]


class BugfixEpisode:
    def __init__(self, task: Task, shape: Shape) -> None:
        self._task = task
        self._shape = shape
        self._repair = Repair(task, shape)

    async def reset(self) -> list[int]:
        self._repair = Repair(self._task, self._shape)
        return self._repair.prompt()

    async def step(self, action: list[int], truncated: bool) -> Observation:
        # A turn cut at its limit has no end token, which makes it malformed: no need to look at `truncated`.
        return self._repair.act(action)

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""
