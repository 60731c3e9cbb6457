"""One prompt, one answer, one reward: the tasks are lines of a JSONL file."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pearl.envs.agents.tasks import TaskSets, load_tasks
from pearl.envs.jsonl.reward_pool import RewardLimits, RewardPool
from pearl.envs.protocol import Split
from pearl.envs.text import Message, TextEnvironment, TextEpisode, Tool
from pearl.envs.text.messages import MessageError, check_messages

log = logging.getLogger(__name__)


class JsonlEnvironment(TextEnvironment):
    can_restore = True

    def __init__(
        self,
        *,
        reward: str = "",
        tasks: str = "",
        evaluation_tasks: str = "",
        prompt_key: str = "prompt",
        solution_key: str = "solution",
        system: str = "",
        reward_timeout_s: float = 10.0,
        reward_memory_bytes: int = 4 << 30,
        reward_processes: int = 1,
    ) -> None:
        """The keywords are ``environment.options``. ValueError names the one that is wrong."""
        files = {"tasks": tasks, "evaluation_tasks": evaluation_tasks}
        self._tasks = load_tasks({key: path for key, path in files.items() if path}, None)
        self._prompt_key = prompt_key
        self._solution_key = solution_key
        self._system = system
        for split in ("train", "evaluation"):
            self._check_prompts(split)
        limits = RewardLimits(reward_timeout_s, reward_memory_bytes, reward_processes)
        self._rewards = RewardPool(reward, limits)
        self.num_train_tasks = len(self._tasks.train)
        self.num_evaluation_tasks = len(self._tasks.evaluation)

    def episode(self, split: Split, task: int) -> TextEpisode:
        row = self._tasks.get(split, task)
        return _Episode(self._messages(row), row, self._rewards)

    def solve(self, split: Split, task: int) -> Sequence[str | Message] | None:
        """The answer under ``solution_key``, where the task has one."""
        solution = self._tasks.get(split, task).get(self._solution_key)
        return None if solution is None else [str(solution)]

    def _check_prompts(self, split: Split) -> None:
        tasks: TaskSets = self._tasks
        rows = tasks.train if split == "train" else tasks.evaluation
        option = "tasks" if split == "train" else "evaluation_tasks"
        for number, row in enumerate(rows, start=1):
            where = f"environment.options.{option}: task {number}"
            if not isinstance(row, Mapping) or not row.get(self._prompt_key):
                keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
                raise ValueError(
                    f"{where} has no {self._prompt_key} (it has {keys}); an object with text or a list of messages "
                    "under that key is needed; environment.options.prompt_key names another"
                )
            try:
                self._messages(row)
            except MessageError as error:
                raise ValueError(f"{where}: {error}") from None

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        prompt = row[self._prompt_key]
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        opening = [{"role": "system", "content": self._system}] if self._system else []
        return check_messages([*opening, *said] if isinstance(said, list) else said, self._prompt_key)


class _Episode(TextEpisode):
    def __init__(self, messages: list[Message], row: Mapping[str, Any], rewards: RewardPool) -> None:
        self._messages = messages
        self._row = row
        self._rewards = rewards

    async def reset(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        return self._messages, []

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        return [], await self._rewards.score(self._row, message["content"]), True
