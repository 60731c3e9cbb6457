"""ExclusiveOperation of a worker's weights, memory or role: one at a time, each within a limit.

A release stops what is under way.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Change = Literal["updating", "activating", "releasing", "switching"]


class ExclusiveOperation:
    def __init__(self) -> None:
        self.current: Change | None = None
        self._lock = asyncio.Lock()
        self._scope: asyncio.Timeout | None = None  # of the current one
        self._is_stopped = False

    @asynccontextmanager
    async def run(self, change: Change, limit_s: float) -> AsyncIterator[None]:
        """Run the block alone; waiting for the change before counts towards the limit.

        Raises:
            StoppedError: ``stop`` came while the block ran.
            TimeoutError: the limit is over.
        """
        try:
            async with asyncio.timeout(limit_s) as scope, self._lock:
                self.current, self._scope, self._is_stopped = change, scope, False
                try:
                    yield
                finally:
                    self.current = self._scope = None
        except TimeoutError:
            if self._is_stopped and scope.expired():
                raise StoppedError("a release came before it was done") from None
            raise TimeoutError(f"{change} took over {limit_s:g} s") from None

    def stop(self) -> None:
        """End the current change at its next wait, unless it is a release itself."""
        scope = self._scope
        if scope is not None and self.current != "releasing" and not scope.expired():
            self._is_stopped = True
            scope.reschedule(asyncio.get_running_loop().time())


class StoppedError(Exception):
    """A change gave way to a release."""
