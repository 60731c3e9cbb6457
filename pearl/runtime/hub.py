"""The coordinator's end of the actor runtime: a ROUTER that knows its peers by ``kind.slot.incarnation``.

Invariants: nothing is sent to a peer before its hello; nothing is lost silently (a queue that is full says so, and
a peer that is gone fails its asks); a dropped peer never speaks again, only its next incarnation does. Liveness is
judged by the service from ``last_heard`` and heartbeats, never from the socket.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import zmq

from pearl.runtime.asks import Asks
from pearl.runtime.clock import Clock, MonotonicClock
from pearl.runtime.codec import Codec, Envelope, Kind, MalformedError
from pearl.runtime.errors import PeerGoneError, QueueFullError, RemoteError
from pearl.runtime.faults import Faults
from pearl.runtime.wire import Wire
from pearl.state.messages.control import Hello

__all__ = ["Asked", "Hub", "Inbound", "Joined", "PeerGoneError", "QueueFullError", "RemoteError", "Told"]

KEEPALIVE_PERIOD_S = 0.5
"""Peers judge their lease by it, so it is well under the shortest sensible lease."""
RETRY_S = 0.005
"""A ROUTER does not say when one peer's pipe has room again, so a backlog is tried again this often."""
PIPE_MESSAGES = 1000  # ZeroMQ's own mark per peer, in front of which our bounded queue stands

log = logging.getLogger(__name__)


class Joined(NamedTuple):
    peer: str
    hello: Hello


class Told(NamedTuple):
    peer: str
    message: Any


class Asked(NamedTuple):
    peer: str
    message: Any
    reply: Callable[[Any], None]


Inbound = Joined | Told | Asked


class _Peer:
    __slots__ = ("backlog", "heard_s", "hello", "identity", "unreachable")

    def __init__(self, hello: Hello, identity: bytes, heard_s: float) -> None:
        self.hello = hello
        self.identity = identity
        self.heard_s = heard_s
        self.backlog: deque[bytes] = deque()
        self.unreachable = False


class Hub:
    """``messages`` is the union of all that peers may send."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        messages: Any,
        queue_messages: int,
        max_frame_bytes: int,
        clock: Clock | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._bind = address
        self._run_id = run_id
        self._codec = Codec(messages, max_frame_bytes)
        self._queue_messages = queue_messages
        self._clock = clock if clock is not None else MonotonicClock()
        self.faults = faults if faults is not None else Faults()
        self._asks = Asks()
        self._peers: dict[str, _Peer] = {}
        self._dropped: set[str] = set()
        self._inbound: deque[Inbound] = deque()
        self._arrived = asyncio.Event()
        self._retrying = False
        self.address = ""
        self.num_stale = 0  # messages of peers that were dropped or never said hello
        self.num_malformed = 0

    async def __aenter__(self) -> Self:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, PIPE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, PIPE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, self._codec.max_frame_bytes)
        try:
            socket.bind(self._bind)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.term()
            raise ValueError(
                f"runtime.address = {self._bind!r} cannot be listened on: {error}. Port 0 takes any free one"
            ) from error
        self.address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._wire = Wire(socket, self._on_frames)
        self._keepalive_frame = self._codec.encode(Kind.KEEPALIVE, 0)
        self._keepalive_timer = asyncio.get_running_loop().call_later(KEEPALIVE_PERIOD_S, self._keep_alive)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keepalive_timer.cancel()
        for name in list(self._peers):
            self.drop(name, "the hub is closed")
        self._wire.close()
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)  # bounded by the linger

    # sending

    def tell(self, peer: str, message: Any) -> None:
        """Queue a message. PeerGoneError, QueueFullError or ValueError (too large); nothing is lost silently."""
        self._send(peer, self._codec.encode(Kind.TELL, 0, message))

    async def ask(self, peer: str, message: Any, *, deadline_s: float, reply_type: type | None = None) -> Any:
        """The answer. TimeoutError, PeerGoneError, QueueFullError, RemoteError (also for an answer that is no
        ``reply_type``). There is no other limit: not of time, not of how many are asked at once."""
        op, future = self._asks.begin(peer)
        try:
            self._send(peer, self._codec.encode(Kind.ASK, op, message))
        except BaseException:
            self._asks.cancel(op)
            raise
        reply = await self._asks.wait(op, future, type(message).__name__, deadline_s)
        if reply_type is not None and not isinstance(reply, reply_type):
            raise RemoteError(f"{peer} answered {type(message).__name__} with {type(reply).__name__}")
        return reply

    def _send(self, name: str, frame: bytes) -> None:
        peer = self._peers.get(name)
        if peer is None:
            raise PeerGoneError(
                f"{name} is not connected" if name not in self._dropped else f"{name} is gone"
            )
        if len(peer.backlog) >= self._queue_messages:
            raise QueueFullError(f"{name} does not read: {len(peer.backlog)} messages wait for it")
        delay_s = self.faults.delay_of(name)
        if delay_s is None:
            return
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._push, peer, frame)
        else:
            self._push(peer, frame)

    def _push(self, peer: _Peer, frame: bytes) -> None:
        if peer.backlog or not self._try(peer, frame):
            peer.backlog.append(frame)
            self._retry_later()

    def _try(self, peer: _Peer, frame: bytes) -> bool:
        try:
            return self._wire.send([peer.identity, frame])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            peer.unreachable = True
            return True  # its connection is gone; the service will hear of its end and drop it

    def _retry_later(self) -> None:
        if not self._retrying:
            self._retrying = True
            asyncio.get_running_loop().call_later(RETRY_S, self._flush_backlogs)

    def _flush_backlogs(self) -> None:
        self._retrying = False
        for peer in self._peers.values():
            while peer.backlog and self._try(peer, peer.backlog[0]):
                peer.backlog.popleft()
            if peer.backlog:
                self._retry_later()

    def _keep_alive(self) -> None:
        for name, peer in list(self._peers.items()):
            if not peer.backlog and self.faults.delay_of(name) is not None:
                self._try(peer, self._keepalive_frame)
            if peer.unreachable and peer.hello.kind == "admin":
                self.drop(name, "it has asked what it wanted")
        self._keepalive_timer = asyncio.get_running_loop().call_later(KEEPALIVE_PERIOD_S, self._keep_alive)

    # receiving

    async def receive(self) -> Inbound:
        """The next thing that a peer said. While nobody receives, at most ``queue_messages`` are held and then
        the socket is not read, so that senders wait."""
        while not self._inbound:
            self._arrived.clear()
            await self._arrived.wait()
        inbound = self._inbound.popleft()
        if len(self._inbound) < self._queue_messages // 2:
            self._wire.resume()
        return inbound

    def _put(self, inbound: Inbound) -> None:
        self._inbound.append(inbound)
        self._arrived.set()
        if len(self._inbound) >= self._queue_messages:
            self._wire.pause()

    def _on_frames(self, parts: list[bytes]) -> None:
        name = parts[0].decode(errors="replace")
        delay_s = self.faults.delay_of(name)
        if delay_s is None:
            return
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._take, name, parts)
        else:
            self._take(name, parts)

    def _take(self, name: str, parts: list[bytes]) -> None:
        try:
            if len(parts) != 2:
                raise MalformedError(f"{len(parts)} parts instead of 2")
            self._dispatch(name, parts[0], self._codec.open(parts[1]))
        except MalformedError as error:
            self.num_malformed += 1
            if self.num_malformed == 1:  # once: a broken peer must not fill the log
                log.warning("malformed message from %s: %s (more are only counted)", name, error)

    def _dispatch(self, name: str, identity: bytes, envelope: Envelope) -> None:
        if envelope.kind == Kind.HELLO:
            self._greet(name, identity, self._codec.message(envelope))
            return
        peer = self._peers.get(name)
        if peer is None:
            self.num_stale += 1
            return
        peer.heard_s = self._clock.now()
        if envelope.kind == Kind.TELL:
            self._put(Told(name, self._codec.message(envelope)))
        elif envelope.kind == Kind.ASK:
            self._put(Asked(name, self._codec.message(envelope), self._replier(name, envelope.op)))
        elif envelope.kind == Kind.REPLY:
            self._asks.answer(envelope.op, name, self._codec.message(envelope))
        elif envelope.kind == Kind.ERROR:
            kind, text = self._codec.error(envelope)
            self._asks.answer(envelope.op, name, RemoteError(f"{kind}: {text}"))

    def _replier(self, name: str, op: int) -> Callable[[Any], None]:
        def reply(message: Any) -> None:
            if name in self._peers:
                self._send(name, self._codec.encode(Kind.REPLY, op, message))

        return reply

    def _greet(self, name: str, identity: bytes, hello: Hello) -> None:
        refusal = self._refusal(name, hello)
        if refusal:
            log.warning("hello of %s refused: %s", name, refusal)
            self._wire.send([identity, self._codec.encode(Kind.REFUSED, 0, refusal)])
            return
        known = name in self._peers
        if not known:
            self._peers[name] = _Peer(hello, identity, self._clock.now())
        self._try(self._peers[name], self._codec.encode(Kind.WELCOME, 0))
        if not known:
            log.info("%s joined from %s, pid %d", name, hello.host, hello.pid)
            self._put(Joined(name, hello))

    def _refusal(self, name: str, hello: Hello) -> str:
        if not isinstance(hello, Hello):
            return "the first message must be a Hello"
        if hello.run_id != self._run_id:
            return f"this is run {self._run_id}, not {hello.run_id}"
        if name != f"{hello.kind}.{hello.slot}.{hello.incarnation}":
            return f"{name} says that it is {hello.kind}.{hello.slot}.{hello.incarnation}"
        known = self._peers.get(name)
        if name in self._dropped:
            return f"{name} was given up; only a new incarnation may join"
        if known is not None and (known.hello.pid, known.hello.host) != (hello.pid, hello.host):
            return f"{name} is here already, pid {known.hello.pid} on {known.hello.host}"
        return ""

    # peers

    def peers(self) -> dict[str, Hello]:
        return {name: peer.hello for name, peer in self._peers.items()}

    def last_heard(self, peer: str) -> float:
        """Time of the clock; KeyError for who is not here."""
        return self._peers[peer].heard_s

    @property
    def num_late_replies(self) -> int:
        return self._asks.num_late

    def drop(self, peer: str, reason: str) -> None:
        """Forget a peer for good: its asks fail, its queue goes, its messages are stale. Harmless twice."""
        if self._peers.pop(peer, None) is not None:
            log.info("%s dropped: %s", peer, reason)
        self._dropped.add(peer)
        self._asks.fail(peer, reason)
