"""The coordinator's inbox: its one way in, and what may lie in it: events, and what becomes one when it is its turn.

A bounded first-in, first-out queue with one reader, and a lane past it. Producers wait while it is full; the reader,
which takes what there is, wakes them. So a flood of frames slows their senders down and is never dropped. What is
urgent keeps its own order and does not wait behind frames.
"""

import asyncio
from collections import deque
from typing import Generic, NamedTuple, TypeVar

from pearl.types.events import AnyEvent, EpisodeOpened, EpisodeStepped
from pearl.types.ids import Incarnation, Slot
from pearl.types.messages.rollout import Deltas

T = TypeVar("T")


class Mailbox(Generic[T]):
    def __init__(self, bound: int) -> None:
        assert bound > 0
        self._bound = bound
        self._items: deque[T] = deque()
        self._urgent: deque[T] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items) + len(self._urgent)

    async def put(self, item: T) -> None:
        """Append; waits while the mailbox is full."""
        while len(self._items) >= self._bound:
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._arrived.set()

    def put_urgent(self, item: T) -> None:
        """Without waiting, before all that is not urgent: GPUs that come and go, signals. A handful at a time."""
        self._urgent.append(item)
        self._arrived.set()

    async def take(self, limit_s: float | None, most: int) -> list[T]:
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


class TokenFrame(NamedTuple):
    """A rollout worker's frame, as it came."""

    slot: Slot
    incarnation: Incarnation
    deltas: Deltas


class EnvironmentResult(NamedTuple):
    """An environment's answer with the ids it brought: a first prompt or an observation."""

    event: EpisodeOpened | EpisodeStepped
    turn: int
    ids: bytes


Item = AnyEvent | TokenFrame | EnvironmentResult
Inbox = Mailbox[Item]
