"""Bytes on their way in host memory: bounded for each peer, so that a slow one costs itself time, nobody else."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from pearl.workers.rollout.kv_transfer.pages import Block


class ByteBudget:
    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._waiting: set[asyncio.Future[None]] = set()  # at most one a conversation

    async def acquire(self, count: int) -> None:
        """Waits for room; more than the limit is let through alone."""
        while self.used and self.used + count > self._limit:
            freed = asyncio.get_running_loop().create_future()
            self._waiting.add(freed)
            try:
                await freed
            finally:
                self._waiting.discard(freed)
        self.used += count

    def release(self, count: int) -> None:
        self.used -= count
        for freed in self._waiting:
            if not freed.done():
                freed.set_result(None)


class Budgets:
    """One budget a peer, as long as somebody talks to it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._budgets: dict[str, tuple[ByteBudget, int]] = {}

    @property
    def used(self) -> int:
        return sum(budget.used for budget, _ in self._budgets.values())

    @contextmanager
    def of(self, peer: str) -> Iterator[ByteBudget]:
        budget, num_users = self._budgets.get(peer) or (ByteBudget(self._limit), 0)
        self._budgets[peer] = budget, num_users + 1
        try:
            yield budget
        finally:
            budget, num_users = self._budgets.pop(peer)
            if num_users > 1:
                self._budgets[peer] = budget, num_users - 1


class SpareBlocks:
    """Memory of blocks that have landed, for those to come: untouched memory costs more than the copy into it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spare: list[Block] = []
        self._held = 0  # bytes

    def take(self, num_bytes: int) -> Block:
        for index, block in enumerate(self._spare):
            if num_bytes <= block.nbytes <= 2 * num_bytes:
                self._held -= block.nbytes
                return self._spare.pop(index)[:num_bytes]
        return np.empty(num_bytes, np.uint8)

    def give(self, block: Block) -> None:
        whole = block if block.base is None else block.base
        if isinstance(whole, np.ndarray) and self._held + whole.nbytes <= self._limit:
            self._held += whole.nbytes
            self._spare.append(whole)

    def clear(self) -> None:
        self._spare.clear()
        self._held = 0
