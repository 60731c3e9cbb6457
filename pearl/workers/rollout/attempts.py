"""Whom an engine tells of each attempt, and which attempt ids are used up."""

from collections import deque
from collections.abc import Sequence

from pearl.workers.rollout.protocol import Delta, Emit

MAX_ENDED = 65536  # ids remembered, to refuse one that is used twice


class UsedIds:
    """Of attempts that have ended, the newest ``MAX_ENDED`` of them."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._order: deque[int] = deque()

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._ids

    def add(self, attempt: int) -> None:
        self._ids.add(attempt)
        self._order.append(attempt)
        if len(self._order) > MAX_ENDED:
            self._ids.discard(self._order.popleft())


def known_attempt(attempt: int) -> ValueError:
    return ValueError(f"attempt {attempt} is already known; every try needs an id of its own")


class LiveAttempts:
    """Attempts that have not had their last delta. Used on the event loop only."""

    def __init__(self) -> None:
        self._emits: dict[int, Emit] = {}
        self._used = UsedIds()

    def __bool__(self) -> bool:
        return bool(self._emits)

    def add(self, attempt: int, emit: Emit) -> None:
        """ValueError when the id is known, be it live or used up."""
        if attempt in self._emits or attempt in self._used:
            raise known_attempt(attempt)
        self._emits[attempt] = emit

    def deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            emit = self._emits[delta.attempt]
            if delta.is_last:
                del self._emits[delta.attempt]
                self._used.add(delta.attempt)
            emit(delta)
