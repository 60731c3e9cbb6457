"""Long-lived tasks that end together, and how often something may be restarted.

A task that dies is never just missing: its error comes out of ``supervise`` at once, with the task's name.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

from pearl.types.error_text import error_text

log = logging.getLogger(__name__)


class TaskFailedError(Exception):
    """A supervised task raised; the error is the ``__cause__``."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"task {name!r} failed: {type(error).__name__}: {error_text(error)}")
        self.name = name
        self.__cause__ = error


class RestartLimit:
    """Restart intensity: more than ``max_restarts`` within ``window_s`` is not worth another try. Pure."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self._window_s = window_s
        self._times: deque[float] = deque(maxlen=max_restarts + 1)

    def allows(self, now: float) -> bool:
        """Count a failure at ``now`` (monotonic seconds); False when it was one too many."""
        self._times.append(now)
        return len(self._times) <= self.max_restarts or now - self._times[0] > self._window_s


async def supervise(tasks: Mapping[str, Coroutine[Any, Any, object]]) -> str:
    """Run all until one of them ends, then cancel and await the others.

    Returns:
        The name of the task that returned first.

    Raises:
        TaskFailedError: the first to end raised; what others raise while they are cancelled is logged.
    """
    first = _First()
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(first.watch(name, task), name=name) for name, task in tasks.items()]
        await first.ended.wait()
        for task in running:
            task.cancel()
    if first.failure is not None:
        raise first.failure
    return first.name


class _First:
    """Which of several tasks ended first, and how."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.name = ""
        self.failure: TaskFailedError | None = None

    async def watch(self, name: str, task: Coroutine[Any, Any, object]) -> None:
        try:
            await task
            self._note(name, None)
        except asyncio.CancelledError as error:
            if not _is_cancelled():  # something that it awaited was cancelled: it would just be missing
                self._note(name, error)
            raise
        except Exception as error:  # noqa: BLE001 - only named here, supervise raises it
            self._note(name, error)

    def _note(self, name: str, error: BaseException | None) -> None:
        failure = None if error is None else TaskFailedError(name, error)
        if failure is not None and (self.ended.is_set() or _is_cancelled()):
            log.error("while it was being ended: %s", failure, exc_info=error)
        if not self.ended.is_set():
            self.name, self.failure = name, failure
            self.ended.set()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0
