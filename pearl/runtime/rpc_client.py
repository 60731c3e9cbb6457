"""A peer's side of its conversation with the coordinator: hello, heartbeats, a handler, a lease.

Notifications are handled one after another in the order they came, calls each in a task of its own. The peer ends
itself when the coordinator has not been heard for the length of its lease: what the coordinator took for dead must not
go on.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq

from pearl.runtime.clock import Clock, MonotonicClock
from pearl.runtime.codec import Envelope, FrameReader, Kind, encode, encode_bounded, encode_failure
from pearl.runtime.errors import (
    MalformedError,
    PeerGoneError,
    QueueFullError,
    RefusedError,
    RemoteError,
)
from pearl.runtime.faults import Faults
from pearl.runtime.liveness import IdleTimer, LoopLag
from pearl.runtime.peer_table import peer_name
from pearl.runtime.pending_calls import PendingCalls
from pearl.runtime.rate_limited_log import RateLimitedLogger
from pearl.runtime.supervisor import supervise
from pearl.runtime.zmq_socket import Outbox, ReadPause, ZmqSocket
from pearl.types.messages.control import Ack, Heartbeat, Hello, Shutdown, Welcome

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"
HELLO_PERIOD_S = 1.0  # a hello that was not answered is said again
EXPECTED_ERRORS = (ValueError, TimeoutError, RemoteError)  # of a handler: an answer, not a bug
Handler = Callable[[Any], Awaitable[msgspec.Struct | None]]


class RpcClient:
    """Call ``run`` once; ``notify`` and ``call`` work from the hello's answer to the end of ``run``, and wait before.

    Args:
        messages: the tagged struct types the coordinator may send, as a union.
        handler: gets notifications, one at a time and therefore quick, and calls, each in its own task, whose answer is
            what it returns (None = Ack). What it raises on a call is answered as an error, on a notification it ends
            the peer.
        heartbeat: called on the event loop every ``heartbeat_period_s``.
        queue_messages: bound of messages to be sent, of notifications not handled yet, and of open calls. When
            one of the latter two is reached the socket is not read, answers included.
    """

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
        clock: Clock | None = None,
    ) -> None:
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.name = peer_name(hello)
        self.faults = Faults(self.clock)
        self.malformed = 0
        self.run_id = hello.run_id  # known when it has been let in
        self.model_path = ""  # of the job, known then too
        self.has_joined = False  # was let in, whatever happened then
        self.was_shut_down = False  # ended because it was told to
        self.address = address
        self._hello = hello
        self._handler = handler
        self._heartbeat = heartbeat
        self._period_s = heartbeat_period_s
        self._lease_s = lease_s
        self._queue_messages = queue_messages
        self._max_frame_bytes = max_frame_bytes
        self._reader = FrameReader(messages | Shutdown | Ack | Welcome, max_frame_bytes)
        self._pending = PendingCalls(self.clock, self._poll)
        self._outbox = Outbox(COORDINATOR, self._send, queue_messages)
        self._room = asyncio.Event()  # the outbox is not full, or the peer has ended
        self._expected = 0  # sequence number of the next frame
        self._notifications: deque[msgspec.Struct] = deque()
        self._told = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._num_calls = 0  # calls being handled
        self._joined = asyncio.Event()  # let in, or ended before
        self._ended = asyncio.Event()
        self._outcome: str | Exception = ""
        self._open: tuple[ZmqSocket, ReadPause] | None = None
        self._idle = IdleTimer(0.0)
        self._malformed_log = RateLimitedLogger(log)

    @property
    def late_replies(self) -> int:
        return self._pending.late_replies

    async def run(self) -> str:
        """Serve until shutdown, dropped, a lost or invalid frame, or lease expiry; returns the reason as text.

        Raises:
            RefusedError: the coordinator does not let it in.
            TaskFailedError: the handler raised on a notification, or the heartbeat did.
            ValueError: ``address`` is malformed.
        """
        assert self._open is None, "a peer runs once"
        port = ZmqSocket(zmq.DEALER, self._max_frame_bytes, self._on_frames, self._flush, self._finish)
        self._open = port, ReadPause(port, self.clock, self._queue_messages)
        # The route is this process's own: another process under the same name is recognised, and refused.
        route = f"{self.name}.{secrets.token_hex(8)}"
        port.connect(self.address, route.encode())
        self._idle = IdleTimer(self.clock.now())
        try:
            await supervise(
                {
                    "calls": self._serve_calls(),  # first: there from the first answer on
                    "conversation": self._converse(),
                    "heartbeat": self._beat(),
                    "notifications": self._serve_notifications(),
                }
            )
        finally:
            self._finish("stopped")
            port.close()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    # speaking

    async def notify(self, message: msgspec.Struct) -> None:
        """Send after everything sent before; waits while the coordinator does not take its messages.

        Raises:
            PeerGoneError: the peer has ended.
            FrameTooLargeError: (a ValueError) names the limit.
        """
        await self._put(Kind.TELL, 0, encode_bounded(message, self._max_frame_bytes))

    async def call(self, message: msgspec.Struct, *, deadline_s: float) -> msgspec.Struct:
        """Send and wait for the answer.

        Raises:
            TimeoutError: no answer within ``deadline_s``.
            RemoteError: the coordinator could not answer.
            PeerGoneError, FrameTooLargeError: see ``tell``.
        """
        body = encode_bounded(message, self._max_frame_bytes)
        name, began = type(message).__name__, self.clock.now()
        try:
            async with asyncio.timeout(deadline_s):
                await self._wait_for_room()
        except TimeoutError:
            raise TimeoutError(f"{COORDINATOR} took no {name} within {deadline_s:g} s") from None
        left_s = max(deadline_s - (self.clock.now() - began), 0.0)
        reply: msgspec.Struct = await self._pending.call(
            COORDINATOR, name, left_s, lambda op: self._outbox.put(Kind.ASK, op, body)
        )
        return reply

    async def _put(self, kind: Kind, op: int, body: bytes) -> None:
        await self._wait_for_room()
        self._outbox.put(kind, op, body)

    async def wait_joined(self) -> None:
        """Wait until it is let in, or has ended."""
        await self._joined.wait()

    async def _wait_for_room(self) -> None:
        await self._joined.wait()
        while self._outbox.is_full and not self._ended.is_set():
            self._room.clear()
            await self._room.wait()
        if self._ended.is_set():
            raise PeerGoneError(f"{self.name} has ended: {self._outcome}")

    def _send(self, frame: bytes) -> bool:
        if self.faults.active:
            if self.faults.is_cut(COORDINATOR):
                return False
            if self.faults.loses(COORDINATOR, "out"):
                return True
        return self._port.try_send((frame,))

    def _flush(self) -> None:
        self._outbox.flush()
        if not self._outbox.is_full:
            self._room.set()

    @property
    def _port(self) -> ZmqSocket:
        assert self._open is not None, "the peer does not run"
        return self._open[0]

    @property
    def _read_pause(self) -> ReadPause:
        assert self._open is not None, "the peer does not run"
        return self._open[1]

    # hello, heartbeat, lease, end

    async def _converse(self) -> None:
        """Say hello until it is answered, then wait for the end."""
        while not self._joined.is_set():
            try:
                welcome = await self._pending.call(COORDINATOR, "Hello", HELLO_PERIOD_S, self._say_hello)
                self._let_in(welcome)
            except TimeoutError:
                log.info("%s: no answer from %s yet", self.name, self.address)
            except PeerGoneError:
                break  # ended meanwhile
        await self._ended.wait()

    def _let_in(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, Welcome):
            self.run_id = answer.run_id
            self.model_path = answer.model_path
        self.has_joined = True
        self._joined.set()

    def _say_hello(self, op: int) -> None:
        self._outbox.put_if_idle(Kind.ASK, op, encode(self._hello))

    async def _beat(self) -> None:
        loop_lag = LoopLag(self._period_s, self.clock.now())
        while True:
            self._poll()
            now = self.clock.now()
            self._idle.excuse(now, loop_lag.measure(now, self._read_pause.paused_s))
            silent_s = self._idle.seconds(now)
            if silent_s > self._lease_s:
                self._finish(f"lease lost: the coordinator was silent for {silent_s:.1f} s")
            if self._joined.is_set():
                self._outbox.put_if_idle(Kind.TELL, 0, encode(self._heartbeat()))
            self._flush()
            await self.clock.sleep(self._period_s)

    def _finish(self, outcome: str | Exception) -> None:
        """The end, and why; only the first counts."""
        if self._ended.is_set():
            return
        self._outcome = outcome
        self._ended.set()
        self._pending.fail(COORDINATOR, f"{self.name} ends: {outcome}")
        self._joined.set()
        self._room.set()

    # hearing

    def _poll(self) -> None:
        self._port.poll()

    def _on_frames(self, frames: list[bytes]) -> None:
        frame = b"".join(frames)
        if self.faults.active:
            self.faults.deliver(COORDINATOR, lambda: self._take(frame))
        else:
            self._take(frame)

    def _take(self, frame: bytes) -> None:
        if self._ended.is_set():
            return
        try:
            envelope = self._reader.envelope(frame)
            if envelope.kind is Kind.REFUSAL:
                self._refused(self._reader.reason(envelope))
                return
        except MalformedError as error:
            self._finish(f"the coordinator sent an invalid frame: {error}")
            return
        if envelope.sequence != self._expected:
            self._finish(f"frame {envelope.sequence} came where {self._expected} was due: some were lost")
            return
        self._expected += 1
        self._idle.heard(self.clock.now())
        if envelope.kind is not Kind.KEEPALIVE:
            self._understand(envelope)

    def _refused(self, reason: str) -> None:
        # The first frame in sequence is the hello's answer; the task that waits for it may not have run yet.
        if self._joined.is_set() or self._expected > 0:
            self._finish(f"dropped by the coordinator: {reason}")
        else:
            self._finish(RefusedError(f"{self.name} is refused: {reason}"))

    def _understand(self, envelope: Envelope) -> None:
        kind, op = envelope.kind, envelope.op
        try:
            message = self._reader.body(envelope)
        except MalformedError as error:
            self._malformed(envelope, error)
            return
        if kind is Kind.REPLY or kind is Kind.ERROR:
            self._pending.resolve(COORDINATOR, op, message)
        elif isinstance(message, Shutdown):
            self.was_shut_down = not self._ended.is_set()
            self._finish(f"shutdown: {message.reason}")
        elif kind is Kind.TELL:
            self._notifications.append(message)
            self._told.set()
        else:
            self._start_handling(op, message)
        self._update_load()

    def _malformed(self, envelope: Envelope, error: MalformedError) -> None:
        self.malformed += 1
        self._malformed_log.warning(self.clock.now(), "malformed message dropped: %s", error)
        if envelope.kind is Kind.ASK:
            # When there is no room for the error, the caller's deadline ends the call.
            with contextlib.suppress(QueueFullError):
                self._outbox.put(Kind.ERROR, envelope.op, encode_failure(error))
        elif envelope.kind is not Kind.TELL:
            self._pending.reject(COORDINATOR, envelope.op, error)

    def _update_load(self) -> None:
        self._read_pause.update(max(len(self._notifications), self._num_calls))

    # handling

    async def _serve_notifications(self) -> None:
        while True:
            while self._notifications:
                await self._handler(self._notifications.popleft())
                self._update_load()
            self._told.clear()
            await self._told.wait()

    async def _serve_calls(self) -> None:
        """Own the tasks that handle calls."""
        async with asyncio.TaskGroup() as self._group:
            await self._ended.wait()

    def _start_handling(self, op: int, message: msgspec.Struct) -> None:
        assert self._group is not None  # made before the hello is said
        self._num_calls += 1
        self._group.create_task(self._handle(op, message), name=type(message).__name__)

    async def _handle(self, op: int, message: msgspec.Struct) -> None:
        try:
            kind, body = await self._answer(message)
            with contextlib.suppress(PeerGoneError):  # ended: nobody waits for the answer
                await self._put(kind, op, body)
        finally:
            self._num_calls -= 1
            self._update_load()

    async def _answer(self, message: msgspec.Struct) -> tuple[Kind, bytes]:
        try:
            reply = await self._handler(message)
            return Kind.REPLY, encode_bounded(Ack() if reply is None else reply, self._max_frame_bytes)
        except EXPECTED_ERRORS as error:
            return Kind.ERROR, encode_failure(error)
        except Exception as error:  # a bug in handling one request must not take the others with it
            log.exception("%s: %s raised", self.name, type(message).__name__)
            return Kind.ERROR, encode_failure(error)
