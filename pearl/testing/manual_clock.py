"""A clock that only a test moves."""

import asyncio
import heapq
import itertools
from collections.abc import Callable


class ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    def __init__(self, now: float = 100.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._timers: list[tuple[float, int, ManualTimer]] = []

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        heapq.heappush(self._timers, (self._now + delay_s, next(self._order), timer))
        return timer

    async def sleep(self, delay_s: float) -> None:
        woken = asyncio.Event()
        self.call_later(delay_s, woken.set)
        await woken.wait()

    def advance(self, seconds: float) -> None:
        """Call what is due on the way, in order; timers that these set count from their own time."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        self._now = end

    def stall(self, seconds: float) -> None:
        """Time passes while nothing runs; what became due is called late, all at once."""
        self._now += seconds
        due = [timer for when, _, timer in sorted(self._timers) if when <= self._now]
        self._timers = [entry for entry in self._timers if entry[0] > self._now]
        heapq.heapify(self._timers)
        for timer in due:
            if timer.callback is not None:
                timer.callback()
