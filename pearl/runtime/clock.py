"""Time as it is passed to whoever measures it: monotonic only, so that a clock set back or forth changes nothing."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call once after ``delay_s``, from the event loop."""
        ...

    async def sleep(self, delay_s: float) -> None: ...


class MonotonicClock:
    """The machine's; needs a running event loop to wait."""

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
