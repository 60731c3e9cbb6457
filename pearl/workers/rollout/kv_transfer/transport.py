"""The thread that hands KV over: a listener, and one task an attempt for its conversation.

It starts with the engine and ends with it or with the process. Notices come from the engine's thread; everything
else happens on this thread's own event loop, so that a busy worker keeps its word to the other side, and a slow
transfer delays nobody's heartbeat.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, assert_never

from pearl.runtime.vital_thread import VitalThread
from pearl.types.error_text import error_text
from pearl.workers.rollout.kv_transfer.address import KvAddress
from pearl.workers.rollout.kv_transfer.budget import Budgets, SpareBlocks
from pearl.workers.rollout.kv_transfer.connection import Connection
from pearl.workers.rollout.kv_transfer.errors import KvTransferError
from pearl.workers.rollout.kv_transfer.frames import Failed, Hello
from pearl.workers.rollout.kv_transfer.incoming import Incoming
from pearl.workers.rollout.kv_transfer.limits import KvLimits
from pearl.workers.rollout.kv_transfer.outgoing import Outgoing
from pearl.workers.rollout.kv_transfer.pages import (
    Begin,
    Ended,
    Expect,
    Granted,
    Landed,
    Notice,
    Pages,
    Ready,
)

log = logging.getLogger(__name__)

JOIN_LIMIT_S = 5.0


class KvTransport:
    """Listens from its construction on, so that ``address`` can be told to others; serves from ``start`` on."""

    def __init__(self, bind_host: str, host: str, name: str, limits: KvLimits | None = None) -> None:
        """``host`` is what others reach this one by; ``name`` what they call it."""
        self.limits = limits or KvLimits()
        self._name = name
        self._listener = socket.create_server(
            (bind_host, 0),
            family=socket.AF_INET6 if ":" in bind_host else socket.AF_INET,
            backlog=self.limits.max_strangers,
            dualstack_ipv6=":" in bind_host,
        )
        self._listener.setblocking(False)
        self.address = KvAddress(host, self._listener.getsockname()[1], secrets.token_hex(8))
        self._thread = VitalThread(target=self._run, name="kv-transport", daemon=True)
        self._serving = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._conversations: dict[int, Outgoing | Incoming] = {}
        self._wanted: dict[
            int, asyncio.Future[Incoming]
        ] = {}  # by connections whose decode stage is not here yet
        self._strangers: set[Connection] = set()

    def start(self, pages: Pages) -> None:
        """Start the thread and wait until it accepts connections (5 s at most)."""
        self._pages = pages
        self._thread.start()
        self._serving.wait(JOIN_LIMIT_S)

    def post(self, notices: Sequence[Notice]) -> None:
        """Queue notices; may be called from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: nothing is handed over any more
                loop.call_soon_threadsafe(self._take, notices)

    def close(self) -> None:
        """End all conversations and free the port. Blocks for a moment; harmless when repeated."""
        loop = self._loop
        if loop is None:
            self._listener.close()
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_LIMIT_S)

    @property
    def num_conversations(self) -> int:
        return len(self._conversations)

    @property
    def staged_bytes(self) -> int:
        return self._outgoing_budgets.used + self._incoming_budgets.used

    # On the transport's loop

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._outgoing_budgets = Budgets(self.limits.window_bytes)
        self._incoming_budgets = Budgets(self.limits.window_bytes)
        self._spare = SpareBlocks(self.limits.window_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._loop = asyncio.get_running_loop()
                self._listen()
                self._serving.set()
                await self._stop.wait()
                for task in self._tasks:
                    task.cancel()
        finally:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            # Accepted in the last moment: a task that is cancelled before its first step closes nothing.
            for connection in self._strangers:
                connection.close()
            for conversation in self._conversations.values():
                conversation.close()

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take(self, notices: Sequence[Notice]) -> None:
        for notice in notices if not self._stop.is_set() else ():
            match notice:
                case Begin():
                    pages, budgets = self._pages, self._outgoing_budgets
                    self._add(Outgoing(notice, self._name, pages, budgets, self.limits))
                case Expect():
                    budgets, spare = self._incoming_budgets, self._spare
                    incoming = Incoming(notice, self._pages, budgets, spare, self.limits)
                    self._add(incoming)
                    if (wanted := self._wanted.pop(notice.attempt, None)) is not None:
                        wanted.set_result(incoming)
                case Ready() | Granted() | Landed() | Ended():
                    self._notify(notice)
                case _:
                    assert_never(notice)

    def _add(self, conversation: Outgoing | Incoming) -> None:
        self._conversations[conversation.attempt] = conversation
        self._begin(f"kv of {conversation.attempt}", self._hold(conversation))

    def _notify(self, notice: Ready | Granted | Landed | Ended) -> None:
        match self._conversations.get(notice.attempt), notice:
            case Outgoing() as outgoing, Ready() | Ended():
                outgoing.notify(notice)
            case Incoming() as incoming, Granted() | Landed() | Ended():
                incoming.notify(notice)

    async def _hold(self, conversation: Outgoing | Incoming) -> None:
        try:
            await conversation.run()
        except KvTransferError as error:  # the engine itself does not answer
            log.warning("attempt %d: %s", conversation.attempt, error)
        # A bug in one conversation must not end those of the others.
        except Exception:
            log.exception("attempt %d: handing over its KV failed", conversation.attempt)
            with contextlib.suppress(ValueError):
                await self._pages.failed(conversation.attempt, "handing over its KV failed; see the log")
        finally:
            if self._conversations.get(conversation.attempt) is conversation:
                del self._conversations[conversation.attempt]
            if not self._conversations:
                self._spare.clear()

    def _listen(self) -> None:
        if not self._stop.is_set():
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept by callback: a cancelled ``await accept`` would lose the connection it was about to return."""
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as error:  # of that connection, or no descriptor is left for now
            log.warning("a connection could not be accepted: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(self.limits.ping_s, self._listen)
            return
        connection = Connection(accepted)
        if len(self._strangers) >= self.limits.max_strangers or self._stop.is_set():
            connection.close()
        else:
            self._strangers.add(connection)
            self._begin("stranger", self._introduce(connection))

    async def _introduce(self, connection: Connection) -> None:
        """Read the hello and hand the connection to the decode stage that waits for it."""
        is_met = False
        try:
            hello = await connection.recv(self.limits.contact_s)
            incoming = await self._wanted_by(hello)
            is_met = incoming.meet(connection)
            if not is_met:
                raise KvTransferError(f"attempt {incoming.attempt} is over here, or in other hands")
        except KvTransferError as error:
            log.info("a prefill stage was turned away: %s", error)
            await connection.finish(Failed(error_text(error)), self.limits.farewell_s)
        finally:
            self._strangers.discard(connection)
            if not is_met:
                connection.close()

    async def _wanted_by(self, hello: object) -> Incoming:
        if not isinstance(hello, Hello) or hello.token != self.address.token:
            raise KvTransferError(f"this is {self._name}, another worker than the one that was meant")
        found = self._conversations.get(hello.attempt)
        if isinstance(found, Incoming):
            return found
        if found is not None or hello.attempt in self._wanted:
            raise KvTransferError(f"attempt {hello.attempt} is in other hands")
        wanted: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        self._wanted[hello.attempt] = wanted
        try:
            async with asyncio.timeout(self.limits.contact_s):
                return await wanted
        except TimeoutError:
            raise KvTransferError(f"no decode stage of attempt {hello.attempt} is here") from None
        finally:
            self._wanted.pop(hello.attempt, None)
