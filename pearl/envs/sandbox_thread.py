"""Runs environment code on an event loop and a thread of its own, so that nothing it does stops the worker's loop.

Every call has a limit. Code that waits past it is cancelled and gives ``LimitError``. Code that blocks its loop
cannot be cancelled: its caller gets ``LimitError`` a little later, the other calls wait behind it, and ``beat`` shows
no progress, by which the coordinator knows that the whole worker has to be replaced.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from pearl.runtime.extensions import describe_error, format_error
from pearl.runtime.vital_thread import VitalThread

log = logging.getLogger(__name__)

T = TypeVar("T")
BLOCKED_GRACE_S = 2.0
"""After a call's own limit: what its cancellation and a busy loop may take before the caller is told."""
STOP_GRACE_S = 1.0
"""For cancelled calls to clean up when the worker ends."""


class LimitError(Exception):
    """The call did not end within its limit."""


class StoppedError(Exception):
    """The call was stopped: nobody wants its outcome any more."""


class Stop:
    """Ends the calls that are given it, now or at once when they begin; from the worker's loop only."""

    def __init__(self) -> None:
        self._outcomes: list[
            tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], list[asyncio.Task[None]]]
        ] = []
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        for loop, outcome, tasks in self._outcomes:
            if not outcome.done():
                outcome.set_exception(StoppedError("it was stopped"))
                loop.call_soon_threadsafe(_cancel, tasks)
        self._outcomes.clear()

    def add(
        self, loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], tasks: list[asyncio.Task[None]]
    ) -> None:
        """A call has begun on ``loop``; its task will be put into ``tasks`` there."""
        self._outcomes.append((loop, outcome, tasks))
        outcome.add_done_callback(self._forget)
        if self.is_set:
            self.set()

    def _forget(self, outcome: asyncio.Future[Any]) -> None:
        self._outcomes = [entry for entry in self._outcomes if entry[1] is not outcome]


class CodeError(Exception):
    """Environment code raised; that is the ``__cause__``."""


class SandboxThread:
    """``start``, any number of calls, ``stop``; all from one event loop."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = VitalThread(target=self._run, name="environment code", daemon=True)
        self._home: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._group: asyncio.TaskGroup
        self._tasks: set[asyncio.Task[None]] = set()  # of the thread's loop
        self._num_open = 0  # calls without an outcome
        self._num_ended = 0
        self._num_pings = 0
        self._num_pongs = 0

    def start(self) -> None:
        self._home = asyncio.get_running_loop()
        self._thread.start()
        self._ready.wait()  # the thread only has to make its loop

    def stop(self) -> None:
        """Cancel what runs and wait for its end, but not for code that blocks; no call may follow."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_GRACE_S)
        if self._thread.is_alive():
            log.warning("environment code does not end; it goes with the process")

    async def call(self, code: Callable[[], Awaitable[T]], limit_s: float, stop: Stop | None = None) -> T:
        """Await ``code()`` on the thread.

        Raises:
            LimitError: it took longer than ``limit_s``.
            StoppedError: ``stop`` was set; the code is cancelled, or when it blocks left to its end.
            CodeError: it raised.
        """
        outcome: asyncio.Future[T] = self._home.create_future()
        tasks: list[asyncio.Task[None]] = []
        self._num_open += 1
        self._loop.call_soon_threadsafe(self._begin, code, limit_s, outcome, tasks)
        if stop is not None:
            stop.add(self._loop, outcome, tasks)
        try:
            async with asyncio.timeout(limit_s + BLOCKED_GRACE_S):
                return await outcome
        except TimeoutError:
            raise LimitError(f"no answer within {limit_s:g} s, and it cannot be cancelled") from None

    def post(self, code: Callable[[], Awaitable[None]], limit_s: float, what: str) -> None:
        """Run ``code()`` without waiting for it; its failure is logged."""
        outcome: asyncio.Future[None] = self._home.create_future()
        outcome.add_done_callback(lambda done: _log_failure(done, what))
        self._num_open += 1
        self._loop.call_soon_threadsafe(self._begin, code, limit_s, outcome, [])

    def beat(self) -> tuple[int, int]:
        """(progress, pending) for a heartbeat; to be called every period.

        A loop that turns is progress, however long the calls on it wait: they have limits of their own.
        """
        is_behind = self._num_pongs < self._num_pings
        if not is_behind:
            self._num_pings += 1
            self._loop.call_soon_threadsafe(self._home_soon, self._pong)
        return self._num_ended + self._num_pongs, self._num_open + is_behind

    def _pong(self) -> None:
        self._num_pongs += 1

    # on the thread

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        async with asyncio.TaskGroup() as self._group:
            self._ready.set()
            await self._stopping.wait()
            for task in self._tasks:
                task.cancel()

    def _begin(
        self,
        code: Callable[[], Awaitable[Any]],
        limit_s: float,
        outcome: asyncio.Future[Any],
        tasks: list[asyncio.Task[None]],
    ) -> None:
        if self._stopping.is_set():
            return
        task = self._group.create_task(self._perform(code, limit_s, outcome), name="environment call")
        self._tasks.add(task)
        tasks.append(task)
        task.add_done_callback(lambda ended: self._ended(ended, outcome))

    async def _perform(
        self, code: Callable[[], Awaitable[Any]], limit_s: float, outcome: asyncio.Future[Any]
    ) -> None:
        result: Any = None
        error: BaseException | None = None
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                result = await code()
        except (
            BaseException
        ) as raised:  # foreign code: whatever it raises, SystemExit included, is its call's outcome
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            error = LimitError(f"no answer within {limit_s:g} s") if limit.expired() else raised
        self._home_soon(self._resolve, outcome, result, error)

    def _ended(self, task: asyncio.Task[None], outcome: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # by its Stop, perhaps before it began
            self._home_soon(self._resolve, outcome, None, StoppedError("it was stopped"))

    def _home_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._stopping.is_set():
            self._home.call_soon_threadsafe(callback, *arguments)

    # back on the worker's loop

    def _resolve(self, outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._num_open -= 1
        self._num_ended += 1
        if outcome.done():
            return  # its caller was told already
        if error is None:
            outcome.set_result(result)
        elif isinstance(error, LimitError | StoppedError):
            outcome.set_exception(error)
        else:
            wrapped = CodeError(describe_error(error))
            wrapped.__cause__ = error
            outcome.set_exception(wrapped)


def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


async def finished(result: Awaitable[T]) -> T:
    """The result of a method that should be async and may be plain."""
    if inspect.isawaitable(result):
        return await result
    return cast(T, result)


def _log_failure(done: asyncio.Future[None], what: str) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("%s: %s", what, error)
        if error.__cause__ is not None:
            log.info("%s", format_error(error.__cause__))
