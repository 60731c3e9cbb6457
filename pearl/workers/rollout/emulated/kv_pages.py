"""The emulated engine as the transport of KV sees it, from the transport's own thread."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Block

T = TypeVar("T")


class KvSide(Protocol):
    """Of an engine, on the engine's loop."""

    async def kv_read(self, attempt: int, count: int) -> Block | None: ...

    async def kv_sent(self, attempt: int) -> None: ...

    async def kv_offered(self, attempt: int, offer: Offer) -> None: ...

    async def kv_landed(self, attempt: int, num_tokens: int) -> None: ...

    async def kv_failed(self, attempt: int, reason: str) -> None: ...


class EmulatedPages:
    """See ``pearl.workers.rollout.kv_transfer.pages.Pages``."""

    def __init__(self, engine: KvSide) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    async def read(self, attempt: int, start: int, count: int) -> Block | None:
        return await self._call(self._engine.kv_read(attempt, count))

    async def sent(self, attempt: int) -> None:
        await self._call(self._engine.kv_sent(attempt))

    async def offered(self, attempt: int, offer: Offer) -> None:
        await self._call(self._engine.kv_offered(attempt, offer))

    async def land(self, attempt: int, version: Version, start: int, count: int, data: Block) -> None:
        await self._call(self._engine.kv_landed(attempt, start + count))

    async def failed(self, attempt: int, reason: str) -> None:
        await self._call(self._engine.kv_failed(attempt, reason))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():  # the worker is over
            work.close()
            raise ValueError("the engine was shut down")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
