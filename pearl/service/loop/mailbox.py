"""The coordinator's one way in: a bounded first-in, first-out queue with one reader, and a lane past it.

Producers wait while it is full; the reader, which takes what there is, wakes them. So a flood of frames slows their
senders down and is never dropped. What is urgent keeps its own order and does not wait behind frames.
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
        self._urgent: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items) + len(self._urgent)

    async def put(self, item: Item) -> None:
        """Append; waits while the mailbox is full."""
        while len(self._items) >= self._bound:
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._arrived.set()

    def put_urgent(self, item: Item) -> None:
        """Without waiting, before all that is not urgent: GPUs that come and go, signals. A handful at a time."""
        self._urgent.append(item)
        self._arrived.set()

    async def take(self, limit_s: float | None, most: int) -> list[Item]:
        """All that is urgent, alone, so that nothing else is handled before it is done; else at most ``most`` of the
        others. Waits up to ``limit_s`` (None = as long as it takes) and returns an empty list when nothing came."""
        if not len(self):
            self._arrived.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        if self._urgent:
            urgent = [*self._urgent]
            self._urgent.clear()
            return urgent
        items = [self._items.popleft() for _ in range(min(len(self._items), most))]
        self._room.set()
        return items
