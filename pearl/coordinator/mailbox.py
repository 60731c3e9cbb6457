"""The coordinator's one way in: a bounded first-in, first-out queue with one reader.

Producers wait while it is full; the reader, which takes everything there is, wakes them. So a flood of frames slows
their senders down and is never dropped.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    def __init__(self, bound: int) -> None:
        assert bound > 0
        self._bound = bound
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: Item) -> None:
        """Append; waits while the mailbox is full."""
        while len(self._items) >= self._bound:
            self._room.clear()
            await self._room.wait()
        self.put_now(item)

    def put_now(self, item: Item) -> None:
        """Append without waiting: for signals and the end of the run, a handful of items over the bound at most."""
        self._items.append(item)
        self._arrived.set()

    async def take(self, limit_s: float | None) -> list[Item]:
        """Everything there is, at most ``bound`` items; waits up to ``limit_s`` (None = as long as it takes) for the
        first and returns an empty list when none came."""
        if not self._items:
            self._arrived.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        count = min(len(self._items), self._bound)
        items = [self._items.popleft() for _ in range(count)]
        self._room.set()
        return items
