"""The coordinator's side of all conversations: lets peers in by their hello, then notifies and calls them.

A peer's name is ``kind.slot.incarnation``; one name, one peer. Its route in the socket is another for every process,
so that a second process under the same name can be told that it is refused. Frames are numbered both ways: a lost
frame is noticed by the next one, at the latest by the next heartbeat, and ends that peer instead of being forgotten.
"""

import asyncio
import logging
from collections import deque
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import msgspec
import zmq

from pearl.runtime.clock import Clock, Timer
from pearl.runtime.codec import (
    Envelope,
    FrameReader,
    Kind,
    Readers,
    encode,
    encode_bounded,
    encode_failure,
)
from pearl.runtime.errors import (
    MalformedError,
    PeerGoneError,
    QueueFullError,
    RemoteError,
)
from pearl.runtime.faults import Faults
from pearl.runtime.inbound import Call, Inbound, Notification, PeerJoined, PeerLost
from pearl.runtime.liveness import LoopLag
from pearl.runtime.peer_table import PeerEntry, PeerTable, peer_name
from pearl.runtime.pending_calls import PendingCalls
from pearl.runtime.rate_limited_log import RateLimitedLogger
from pearl.runtime.send_queues import SendQueues
from pearl.runtime.zmq_socket import ReadPause, ZmqSocket
from pearl.types.messages.control import Ack, Hello, Installation, Welcome

log = logging.getLogger(__name__)
Reply = TypeVar("Reply", bound=msgspec.Struct)

KEEPALIVE_PERIOD_S = 0.5  # a twentieth of the default lease
MAX_HELLO_BYTES = 64 << 10
"""Of a frame from somebody who has not said hello: it is read only if it can be one."""
LATE_S = 1.0  # the loop held up for longer is worth a line


class Counters(msgspec.Struct):
    malformed: int = 0  # frames that could not be read
    stale_messages: int = 0  # from peers that are not members (any more)
    refused: int = 0  # hellos
    lost_peers: int = 0  # dropped because frames were missing


class RpcServer:
    """Use as an async context manager: it listens inside.

    Args:
        address: where to listen; with port 0, ``self.address`` says which port was chosen.
        run_id: a hello for another run is refused; who does not know it learns it from the answer to its hello.
        messages: the tagged struct types that peers may send, as a union, or a ``Sender`` for each kind of peer.
        installation: what agents and workers must have to be let in; None = whatever they have.
        model_path: of the job; told to those who are let in.
        queue_messages: bound of the queue to each peer and of the one to ``receive``. When that one is full the socket
            is not read, answers included, until ``receive`` has taken half of it: the receiver must not wait for
            an answer itself.

    Raises (on entering):
        ValueError: the address cannot be had.
    """

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        messages: Any,
        queue_messages: int,
        max_frame_bytes: int,
        clock: Clock,
        installation: Installation | None = None,
        model_path: str = "",
        keepalive_period_s: float = KEEPALIVE_PERIOD_S,
    ) -> None:
        self.address = address
        self.clock = clock
        self.counters = Counters()
        self.faults = Faults(clock)
        self._queue_messages = queue_messages
        self._max_frame_bytes = max_frame_bytes
        self._keepalive_period_s = keepalive_period_s
        self._readers = Readers(messages, Hello | Ack, max_frame_bytes)
        self._hellos = FrameReader(Hello, MAX_HELLO_BYTES)
        self.installation = installation
        self._members = PeerTable(run_id, installation)
        self._welcome = Welcome(run_id, model_path)
        self._send_queues = SendQueues(self._members, self.faults, queue_messages, self._transmit)
        self._pending = PendingCalls(clock, self._poll)
        self._inbound: deque[Inbound] = deque()
        self._arrived = asyncio.Event()
        self._num_delivered = 0  # to ``receive``, in all
        self._num_handled = 0  # of those: the receiver has come back for more
        self._handled = asyncio.Event()  # pulsed whenever one more is
        self._failure: Exception | None = None
        self._loop_lag = LoopLag(keepalive_period_s, clock.now())
        self._late_log = RateLimitedLogger(log)
        self._malformed_log = RateLimitedLogger(log)
        self._refused_log = RateLimitedLogger(log)
        self._open: tuple[ZmqSocket, ReadPause] | None = None
        self._timer: Timer | None = None

    async def __aenter__(self) -> Self:
        port = ZmqSocket(
            zmq.ROUTER, self._max_frame_bytes, self._on_frames, self._send_queues.flush, self._on_failure
        )
        self.address = port.bind(self.address)
        self._open = port, ReadPause(port, self.clock, self._queue_messages)
        self._loop_lag = LoopLag(self._keepalive_period_s, self.clock.now())
        self._tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for name in self._members.by_name:
            self._pending.fail(name, "the coordinator stops")
        self._port.close()

    # what the coordinator does

    def notify(self, peer: str, message: msgspec.Struct) -> None:
        """Send without waiting, after everything sent to this peer before.

        Raises:
            PeerGoneError: there is no such peer.
            QueueFullError: it does not take its messages; this one was not sent.
            FrameTooLargeError: (a ValueError) names the limit.
        """
        member = self._member(peer)
        self._send_queues.post(member, Kind.TELL, 0, encode_bounded(message, self._max_frame_bytes))

    @overload
    async def call(self, peer: str, message: msgspec.Struct, *, deadline_s: float) -> msgspec.Struct: ...
    @overload
    async def call(
        self, peer: str, message: msgspec.Struct, *, deadline_s: float, reply_type: type[Reply]
    ) -> Reply: ...
    async def call(
        self,
        peer: str,
        message: msgspec.Struct,
        *,
        deadline_s: float,
        reply_type: type[msgspec.Struct] = msgspec.Struct,
    ) -> msgspec.Struct:
        """Send, and wait for the peer's answer. Any number of calls may be open at once.

        Raises:
            TimeoutError: no answer within ``deadline_s``; one that comes later is dropped and counted.
            RemoteError: the peer's handler raised, or the answer is no ``reply_type``.
            PeerGoneError: the peer is unknown, or was lost or dropped meanwhile.
            QueueFullError, FrameTooLargeError: it was not sent, see ``notify``.
        """
        member = self._member(peer)
        body = encode_bounded(message, self._max_frame_bytes)
        name = type(message).__name__
        reply = await self._pending.call(
            peer, name, deadline_s, lambda op: self._send_queues.post(member, Kind.ASK, op, body)
        )
        if not isinstance(reply, reply_type):
            answer = type(reply).__name__
            raise RemoteError(f"{peer} answered {name} with {answer}, not {reply_type.__name__}")
        return reply

    async def receive(self) -> Inbound:
        """Return the next message, for one receiver, who has handled it when it calls again. Waits as long as
        nothing comes."""
        self._num_handled = self._num_delivered - len(self._inbound)
        self._handled.set()
        while not self._inbound or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        item = self._inbound.popleft()
        self._read_pause.update(len(self._inbound))
        return item

    async def caught_up(self) -> None:
        """Wait until all that has arrived by now was handled by the receiver: notifications that a peer sent
        before it answered a call."""
        target = self._num_delivered
        while self._num_handled < target:
            self._handled.clear()
            await self._handled.wait()

    def drop(self, peer: str, reason: str) -> None:
        """Forget the peer: calls to it fail, what waits to be sent is discarded, and it is told to end.
        Nothing happens when it is unknown."""
        member = self._members.remove(peer)
        if member is None:
            return
        self._pending.fail(peer, reason)
        self._send_queues.refuse(member.route, peer, 0, reason)
        log.info("%s dropped: %s", peer, reason)

    def peers(self) -> tuple[str, ...]:
        return tuple(self._members.by_name)

    def hello(self, peer: str) -> Hello:
        return self._member(peer).hello

    def is_connected(self, peer: str) -> bool:
        """Whether frames for it find a way, as far as this host can tell; tried on the spot."""
        member = self._members.by_name.get(peer)
        return member is not None and self._send_queues.reaches(member)

    def last_heard(self, peer: str) -> float:
        """Return when something last came from the peer, on ``clock``."""
        return self._member(peer).last_heard

    @property
    def paused_s(self) -> float:
        """Return for how many seconds in all the socket was not read because ``receive`` did not keep up."""
        return self._read_pause.paused_s

    @property
    def late_replies(self) -> int:
        """Answers that came after their deadline or after the asker had left."""
        return self._pending.late_replies

    # sending

    @property
    def _port(self) -> ZmqSocket:
        assert self._open is not None, "the server is not entered"
        return self._open[0]

    @property
    def _read_pause(self) -> ReadPause:
        assert self._open is not None, "the server is not entered"
        return self._open[1]

    def _transmit(self, frames: tuple[bytes, bytes]) -> bool:
        return self._port.try_send(frames)

    def _member(self, peer: str) -> PeerEntry:
        member = self._members.by_name.get(peer)
        if member is None:
            raise PeerGoneError(f"{peer} is not connected")
        return member

    def _answer(self, member: PeerEntry, kind: Kind, op: int, body: bytes) -> None:
        """Send an answer to a peer that may be gone; one that does not take its answers is lost, and nobody else
        hurt."""
        if not self._members.has(member):
            return
        try:
            self._send_queues.post(member, kind, op, body)
        except QueueFullError as error:
            self._lose(member, str(error))

    def _tick(self) -> None:
        self._timer = self.clock.call_later(self._keepalive_period_s, self._tick)
        self._port.guard(self._keep_alive)

    def _keep_alive(self) -> None:
        now = self.clock.now()
        lag_s = self._loop_lag.measure(now)
        if lag_s > LATE_S:
            self._late_log.warning(now, "the event loop was held up for %.1f s", lag_s)
        for name in self._send_queues.keep_alive():
            self.drop(name, "it went")

    # receiving

    def _poll(self) -> None:
        self._port.poll()

    def _on_failure(self, error: Exception) -> None:
        """A bug of ours in a callback: whoever receives gets it."""
        self._failure = self._failure or error
        self._arrived.set()

    def _on_frames(self, frames: list[bytes]) -> None:
        route, frame = frames[0], frames[1] if len(frames) == 2 else b""
        if self.faults.active and (member := self._members.at(route)) is not None:
            self.faults.deliver(member.name, lambda: self._take(route, frame))
        else:
            self._take(route, frame)

    def _take(self, route: bytes, frame: bytes) -> None:
        member = self._members.at(route)
        reader = self._hellos if member is None else self._readers.of(member.hello.kind)
        try:
            envelope = reader.envelope(frame)
        except MalformedError as error:
            self._malformed(repr(route) if member is None else member.name, error)
            if member is not None:
                self._lose(member, f"sent an invalid frame: {error}")
            return
        if member is None:
            self._on_unknown_peer(route, envelope)
        elif envelope.sequence != member.expected:
            hole = f"frame {envelope.sequence} came where {member.expected} was due"
            self._lose(member, f"{hole}: some were lost")
        else:
            member.expected += 1
            member.last_heard = self.clock.now()
            self._understand(member, envelope)

    def _understand(self, member: PeerEntry, envelope: Envelope) -> None:
        kind, op = envelope.kind, envelope.op
        try:
            message = self._readers.of(member.hello.kind).body(envelope)
        except MalformedError as error:
            self._malformed(member.name, error)
            if kind is Kind.ASK:
                self._answer(member, Kind.ERROR, op, encode_failure(error))
            elif kind is not Kind.TELL:
                self._pending.reject(member.name, op, error)
            return
        if kind is Kind.REPLY or kind is Kind.ERROR:
            self._pending.resolve(member.name, op, message)
        elif kind is Kind.TELL:
            self._deliver(Notification(member.name, message))
        elif isinstance(message, Hello):
            self._answer(
                member, Kind.REPLY, op, encode(self._welcome)
            )  # it had not seen the first answer yet
        else:
            self._deliver(self._as_call(member, op, message))

    def _as_call(self, member: PeerEntry, op: int, message: msgspec.Struct) -> Call:
        def reply(answer: msgspec.Struct) -> None:
            self._answer(member, Kind.REPLY, op, encode_bounded(answer, self._max_frame_bytes))

        def fail(error: Exception) -> None:
            self._answer(member, Kind.ERROR, op, encode_failure(error))

        return Call(member.name, message, reply, fail)

    def _deliver(self, item: Inbound) -> None:
        self._inbound.append(item)
        self._num_delivered += 1
        self._arrived.set()
        self._read_pause.update(len(self._inbound))

    # coming and going

    def _on_unknown_peer(self, route: bytes, envelope: Envelope) -> None:
        try:
            message = self._hellos.body(envelope) if envelope.kind is Kind.ASK else None
        except MalformedError as error:
            self._malformed(repr(route), error)
            return
        if isinstance(message, Hello):
            self._admit_peer(route, envelope, message)
            return
        self.counters.stale_messages += 1
        if self._members.note_refused(route):
            self._send_queues.refuse(
                route, "", envelope.op, "it is not known here: it did not say hello, or was dropped"
            )

    def _admit_peer(self, route: bytes, envelope: Envelope, hello: Hello) -> None:
        name, now = peer_name(hello), self.clock.now()
        reason = self._members.objection(hello)
        if reason:
            self.counters.refused += 1
            whence = f"pid {hello.pid} on {hello.host}"
            self._refused_log.warning(now, "%s (%s) refused: %s", name, whence, reason)
            self._send_queues.refuse(route, name, envelope.op, reason)
            return
        outbox = self._send_queues.make_outbox(name, route)
        member = PeerEntry(name, route, hello, outbox, now, envelope.sequence + 1)
        self._members.add(member)
        self._send_queues.post(member, Kind.REPLY, envelope.op, encode(self._welcome))
        log.info("%s joined: pid %d on %s", name, hello.pid, hello.host)
        self._deliver(PeerJoined(name, hello))

    def _lose(self, member: PeerEntry, reason: str) -> None:
        self.counters.lost_peers += 1
        log.warning("%s lost: %s", member.name, reason)
        self.drop(member.name, reason)
        self._deliver(PeerLost(member.name, reason))

    def _malformed(self, sender: str, error: MalformedError) -> None:
        self.counters.malformed += 1
        self._malformed_log.warning(self.clock.now(), "malformed frame from %s dropped: %s", sender, error)
