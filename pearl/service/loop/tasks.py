"""The one task group of the run, with names: a task that fails ends the run, and the end of the run ends every task."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """All of them; the group then waits for their ends."""
        for task in self._tasks:
            task.cancel()
