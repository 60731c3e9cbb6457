"""What an environment in text derives from: the person's code says messages, PEARL makes the ids."""

from collections.abc import Sequence

from pearl.envs.protocol import Split
from pearl.envs.text.messages import Message, Tool


class TextEpisode:
    """One task's conversation. ``reset`` and ``step`` are to be written."""

    async def reset(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """The first messages, and the tools that the model may call (none: an empty list)."""
        raise NotImplementedError

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        """The assistant's message, its tool calls read; returns what follows it, the episode's total reward so far
        and whether it is done."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release everything; must be harmless twice."""


class TextEnvironment:
    """``episode`` is to be written; the class takes its own ``environment.options`` as keywords."""

    num_train_tasks: int = 0  # 0 = unbounded
    num_evaluation_tasks: int = 0
    can_restore: bool = False  # replaying the same answers gives the same messages

    def episode(self, split: Split, task: int) -> TextEpisode:
        """The same (split, task) is always the same task."""
        raise NotImplementedError

    def solve(self, split: Split, task: int) -> Sequence[str | Message] | None:
        """The answers of a reference solution turn by turn, as text or as messages with tool calls; None where there
        is none. Only ``pearl check-env`` asks."""
        return None
