"""A worker's end of the actor runtime: a DEALER that serves one coordinator until told to stop or left alone.

Tells are handled one at a time, in order; asks are started in that same order and then run side by side, bounded.
A handler's error is the answer to the ask that met it and ends nothing else. The coordinator's silence for
``lease_s`` ends the peer: what it would still do belongs to nobody.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import zmq

from pearl.runtime.asks import Asks
from pearl.runtime.codec import Codec, Envelope, Kind, MalformedError
from pearl.runtime.errors import QueueFullError, RemoteError
from pearl.runtime.hub import PIPE_MESSAGES
from pearl.runtime.wire import Wire
from pearl.state.messages.control import Heartbeat, Hello, Shutdown

HELLO_PERIOD_S = 0.2  # until it is acknowledged
MAX_ASKS = 1024
"""Asks of the coordinator served side by side; the next waits in the queue, which stops the socket when full."""

log = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Any]]


class Peer:
    def __init__(
        self,
        address: str,
        *,
        hello: Hello,
        messages: Any,
        handler: Handler,
        heartbeat: Callable[[], Heartbeat],
        heartbeat_period_s: float,
        lease_s: float,
        queue_messages: int,
        max_frame_bytes: int,
        ends_on_shutdown: bool = True,
    ) -> None:
        self._address = address
        self._hello = hello
        self._codec = Codec(messages, max_frame_bytes)
        self._handler = handler
        self._heartbeat = heartbeat
        self._heartbeat_period_s = heartbeat_period_s
        self._lease_s = lease_s
        self._queue_messages = queue_messages
        self._ends_on_shutdown = ends_on_shutdown
        self._asks = Asks()
        self._inbound: deque[Envelope] = deque()
        self._arrived = asyncio.Event()
        self._outbound: deque[bytes] = deque()
        self._room = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_ASKS)
        self._welcomed = asyncio.Event()
        self._ended = asyncio.Event()
        self._reason = ""
        self._heard_s = 0.0
        self._wire: Wire | None = None

    @property
    def name(self) -> str:
        return f"{self._hello.kind}.{self._hello.slot}.{self._hello.incarnation}"

    # life

    async def run(self) -> str:
        """Say hello and serve; returns why it ended. Cancelling it closes the connection."""
        loop = asyncio.get_running_loop()
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.name.encode())
        socket.setsockopt(zmq.SNDHWM, PIPE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, PIPE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, self._codec.max_frame_bytes)
        socket.connect(self._address)
        self._wire = Wire(socket, self._on_frames)
        self._wire.on_writable = self._flush
        self._heard_s = loop.time()
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [
                    tasks.create_task(self._introduce(), name="hello and heartbeat"),
                    tasks.create_task(self._serve(tasks), name="serve"),
                    tasks.create_task(self._keep_lease(), name="lease"),
                ]
                await self._ended.wait()
                for task in serving:
                    task.cancel()
        finally:
            self._flush()
            self._wire.close()
            self._wire = None
            self._asks.fail(self.name, self._reason or "the connection is closed")
            await loop.run_in_executor(None, context.term)  # bounded by the linger
        return self._reason

    def end(self, reason: str) -> None:
        """Have ``run`` return; the first reason counts."""
        self._reason = self._reason or reason
        self._ended.set()

    async def _introduce(self) -> None:
        hello = self._codec.encode(Kind.HELLO, 0, self._hello)
        while not self._welcomed.is_set():
            assert self._wire is not None
            self._wire.send([hello])
            try:
                async with asyncio.timeout(HELLO_PERIOD_S):
                    await self._welcomed.wait()
            except TimeoutError:
                continue
        self._flush()
        while True:
            self._post(self._codec.encode(Kind.TELL, 0, self._heartbeat()))
            await asyncio.sleep(self._heartbeat_period_s)

    async def _keep_lease(self) -> None:
        """Time in which this loop itself was not running does not count against the coordinator."""
        loop = asyncio.get_running_loop()
        period = min(1.0, self._lease_s / 4)
        left = self._lease_s
        heard = self._heard_s
        while left > 0:
            await asyncio.sleep(period)
            if self._heard_s != heard:
                heard = self._heard_s
                left = self._lease_s - (loop.time() - heard)
            else:
                left -= period
        self.end(f"nothing was heard from the coordinator for {self._lease_s:g} s")

    # sending

    async def tell(self, message: Any) -> None:
        """Queue a message; waits while the queue is full."""
        frame = self._codec.encode(Kind.TELL, 0, message)
        while len(self._outbound) >= self._queue_messages and not self._ended.is_set():
            self._room.clear()
            await self._room.wait()
        self._post(frame)

    async def ask(self, message: Any, *, deadline_s: float) -> Any:
        """The coordinator's answer. TimeoutError, RemoteError, QueueFullError, PeerGoneError."""
        if len(self._outbound) >= self._queue_messages:
            raise QueueFullError(f"the coordinator does not read: {len(self._outbound)} messages wait")
        op, future = self._asks.begin(self.name)
        try:
            self._post(self._codec.encode(Kind.ASK, op, message))
        except BaseException:
            self._asks.cancel(op)
            raise
        return await self._asks.wait(op, future, type(message).__name__, deadline_s)

    def _post(self, frame: bytes) -> None:
        self._outbound.append(frame)
        self._flush()

    def _flush(self) -> None:
        if self._wire is None or not self._welcomed.is_set():
            return
        while self._outbound and self._wire.send([self._outbound[0]]):
            self._outbound.popleft()
        if len(self._outbound) < self._queue_messages:
            self._room.set()

    # receiving

    def _on_frames(self, parts: list[bytes]) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        try:
            self._dispatch(self._codec.open(parts[-1]))
        except MalformedError as error:
            log.warning("malformed message from the coordinator: %s", error)

    def _dispatch(self, envelope: Envelope) -> None:
        match envelope.kind:
            case Kind.TELL | Kind.ASK:
                self._inbound.append(envelope)
                self._arrived.set()
                if len(self._inbound) >= self._queue_messages and self._wire is not None:
                    self._wire.pause()
            case Kind.REPLY:
                self._asks.answer(envelope.op, self.name, self._codec.message(envelope))
            case Kind.ERROR:
                kind, text = self._codec.error(envelope)
                self._asks.answer(envelope.op, self.name, RemoteError(f"{kind}: {text}"))
            case Kind.WELCOME:
                self._welcomed.set()
            case Kind.REFUSED:
                self.end(f"refused: {self._codec.text(envelope)}")
            case _:
                pass  # a keepalive has done its work by arriving

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            while not self._inbound:
                self._arrived.clear()
                await self._arrived.wait()
            envelope = self._inbound.popleft()
            if len(self._inbound) < self._queue_messages // 2 and self._wire is not None:
                self._wire.resume()
            await self._begin(envelope, tasks)

    async def _begin(self, envelope: Envelope, tasks: asyncio.TaskGroup) -> None:
        try:
            message = self._codec.message(envelope)
        except MalformedError as error:
            log.warning("malformed message from the coordinator: %s", error)
            if envelope.kind == Kind.ASK:
                self._answer_error(envelope.op, error)
            return
        if envelope.kind == Kind.ASK:
            await self._slots.acquire()
            tasks.create_task(self._answer(envelope.op, message), name=type(message).__name__)
            return
        await self._take(message)
        if isinstance(message, Shutdown) and self._ends_on_shutdown:
            self.end(f"told to: {message.reason}")

    async def _take(self, message: Any) -> None:
        try:
            await self._handler(message)
        except Exception:
            log.exception("%s could not be handled", type(message).__name__)

    async def _answer(self, op: int, message: Any) -> None:
        try:
            reply = await self._handler(message)
            frame = self._codec.encode(Kind.REPLY, op, reply)
        except Exception as error:
            if not isinstance(error, ValueError | OSError | TimeoutError):
                log.exception("%s failed", type(message).__name__)
            self._answer_error(op, error)
        else:
            self._post(frame)
        finally:
            self._slots.release()

    def _answer_error(self, op: int, error: Exception) -> None:
        self._post(self._codec.encode(Kind.ERROR, op, (type(error).__name__, str(error))))
