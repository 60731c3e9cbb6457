"""Questions that wait for an answer: each with its deadline, and an end for each of them."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from pearl.runtime.clock import Clock
from pearl.runtime.codec import Failure
from pearl.runtime.errors import PeerGoneError, RemoteError
from pearl.types.error_text import error_text


class _Pending(msgspec.Struct, eq=False):
    peer: str
    answer: asyncio.Future[Any]
    late: str  # what to say when the deadline passes


class PendingCalls:
    """Args:
    poll: takes in everything that has arrived. Before a deadline counts as missed, an answer that is there
        already is looked for: a loop that was held up may see the time before it sees the answer.
    """

    def __init__(self, clock: Clock, poll: Callable[[], None]) -> None:
        self._clock = clock
        self._poll = poll
        self._ops = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self.late_replies = 0

    def __len__(self) -> int:
        return len(self._pending)

    async def call(self, peer: str, name: str, deadline_s: float, post: Callable[[int], None]) -> Any:
        """Post the question under a fresh op and wait.

        Raises:
            TimeoutError: with the peer, the question's name and the deadline.
            RemoteError, PeerGoneError: see ``RpcServer.ask``; whatever ``post`` raises.
        """
        op = next(self._ops)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        late = f"{peer} did not answer {name} within {deadline_s:g} s"
        self._pending[op] = _Pending(peer, answer, late)
        timer = self._clock.call_later(deadline_s, lambda: self._expire(op))
        try:
            post(op)
            return await answer
        finally:
            timer.cancel()
            del self._pending[op]

    def resolve(self, peer: str, op: int, outcome: msgspec.Struct) -> None:
        """An answer came from the peer: a message, or the failure that stands for it."""
        pending = self._pending.get(op)
        if pending is None or pending.answer.done() or pending.peer != peer:
            self.late_replies += 1
        elif isinstance(outcome, Failure):
            pending.answer.set_exception(RemoteError(outcome.text, outcome.kind))
        else:
            pending.answer.set_result(outcome)

    def reject(self, peer: str, op: int, error: Exception) -> None:
        """Fail a call whose answer cannot be read."""
        self.resolve(peer, op, Failure(type(error).__name__, error_text(error)))

    def fail(self, peer: str, reason: str) -> None:
        """The peer is gone: nothing asked of it will be answered."""
        for pending in self._pending.values():
            if pending.peer == peer and not pending.answer.done():
                pending.answer.set_exception(PeerGoneError(f"{peer} is gone: {reason}"))

    def _expire(self, op: int) -> None:
        self._poll()
        pending = self._pending.get(op)
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(TimeoutError(pending.late))
