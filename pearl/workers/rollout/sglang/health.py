"""Whether SGLang lives: its process may end, and its scheduler may be stuck behind a server that answers."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from pearl.workers.rollout.sglang.client import ServerError

PERIOD_S = 2.0
MAX_SILENT = 5
"""Looks in a row that its scheduler did not answer; then it is stuck, and the worker with it."""


class EngineDiedError(Exception):
    """SGLang ended, or is stuck; the worker cannot go on."""


class Health:
    def __init__(self, look: Callable[[], Awaitable[object]], on_failure: Callable[[str], None]) -> None:
        """``look`` asks the scheduler for anything; ``on_failure`` is told the reason at once."""
        self.failure = ""
        self.is_restarting = False
        """While it is, nobody answers, and that is no failure."""
        self._look = look
        self._on_failure = on_failure
        self._has_failed = asyncio.Event()

    def fail(self, reason: str) -> None:
        self.failure = reason
        self._on_failure(reason)
        self._has_failed.set()

    async def watch(self) -> None:
        """Watch the server until it has died or stopped answering. Raises EngineDiedError."""
        num_silent = 0
        while not self.failure:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._has_failed.wait()
            if self.is_restarting:
                continue
            try:
                await self._look()
                num_silent = 0
            except ServerError as error:
                num_silent += 1
                if num_silent >= MAX_SILENT and not self.failure:
                    self.fail(f"SGLang's scheduler is silent: {error}")
        raise EngineDiedError(self.failure)
