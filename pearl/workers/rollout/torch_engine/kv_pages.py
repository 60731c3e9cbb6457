"""The engine's pages as the transport sees them: every call is done in the engine's thread, between two iterations."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Block
from pearl.workers.rollout.torch_engine.core import EngineCore

T = TypeVar("T")


class Call(Protocol):
    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class EnginePages:
    """Implements ``kv_transfer.pages.Pages`` on the engine's thread; ValueError after shutdown."""

    def __init__(self, core: EngineCore, call: Call) -> None:
        self._core = core
        self._call = call

    async def read(self, attempt: int, start: int, count: int) -> Block | None:
        return await self._call(lambda: self._core.kv_read(attempt, start, count))

    async def sent(self, attempt: int) -> None:
        await self._call(lambda: self._core.kv_sent(attempt))

    async def offered(self, attempt: int, offer: Offer) -> None:
        await self._call(lambda: self._core.kv_offered(attempt, offer))

    async def land(self, attempt: int, version: Version, start: int, count: int, data: Block) -> None:
        await self._call(lambda: self._core.kv_arrived(attempt, version, start, count, data))

    async def failed(self, attempt: int, reason: str) -> None:
        await self._call(lambda: self._core.kv_failed(attempt, reason))
