"""Asks under way: each waits for its answer, an error, its deadline or the loss of its peer, whichever is first."""

import asyncio
from typing import Any

from pearl.runtime.errors import PeerGoneError, RemoteError


class Asks:
    def __init__(self) -> None:
        self._next_op = 1
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self.num_late = 0

    def begin(self, peer: str) -> tuple[int, asyncio.Future[Any]]:
        op = self._next_op
        self._next_op += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[op] = (peer, future)
        return op, future

    async def wait(self, op: int, future: asyncio.Future[Any], what: str, deadline_s: float) -> Any:
        peer = self._waiting[op][0]
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            raise TimeoutError(f"{peer} did not answer {what} within {deadline_s:g} s") from None
        finally:
            self._waiting.pop(op, None)

    def cancel(self, op: int) -> None:
        """It was never sent."""
        self._waiting.pop(op)[1].cancel()

    def answer(self, op: int, peer: str, value: Any) -> None:
        entry = self._waiting.get(op)
        if entry is None or entry[0] != peer or entry[1].done():
            self.num_late += 1
        elif isinstance(value, RemoteError):
            entry[1].set_exception(value)
        else:
            entry[1].set_result(value)

    def fail(self, peer: str, reason: str) -> None:
        """Its peer is gone."""
        for owner, future in list(self._waiting.values()):
            if owner == peer and not future.done():
                future.set_exception(PeerGoneError(f"{peer} is gone: {reason}"))
