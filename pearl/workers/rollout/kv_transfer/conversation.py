"""What both sides of a conversation share: they speak, hear and move blocks at the same time, and end as one."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from pearl.workers.rollout.kv_transfer.errors import KvTransferError

T = TypeVar("T")


async def converse(speak: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> None:
    """Run all parts until ``speak`` has sent everything. Raises the KvTransferError of whichever fails first."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(other) for other in others]
            await speak
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        expected, bugs = failures.split(KvTransferError)
        if expected is None or bugs is not None:
            raise
        raise expected.exceptions[0] from None


async def answer_of(engine: Awaitable[T], limit_s: float) -> T:
    """Await the engine's answer, which it gives between two iterations."""
    try:
        async with asyncio.timeout(limit_s):
            return await engine
    except TimeoutError:
        raise KvTransferError(f"the engine did not answer within {limit_s:g} s") from None
    except ValueError as error:
        raise KvTransferError(f"the engine refused: {error}") from error


class Movement:
    """Wakes one waiter when something has changed; notices when nothing does for too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()

    def happened(self) -> None:
        self._since = self._loop.time()
        self._event.set()

    async def wait(self, limit_s: float) -> bool:
        """Call it right after looking, without waiting in between: what happens later wakes it.

        Returns whether something happened within the limit.

        Raises:
            KvTransferError: nothing has for the longest time allowed.
        """
        self._event.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._event.wait()
        except TimeoutError:
            if self._loop.time() - self._since > self._limit_s:
                raise KvTransferError(f"nothing moved for {self._limit_s:g} s") from None
            return False
        return True
