"""One ZeroMQ socket on the event loop, without a thread or a task of its own.

The socket's descriptor is edge-triggered and any call may swallow its edge, so reading goes on until the socket says
that there is nothing, and after each send the socket is asked again. A peer that stops reading makes ``try_send``
say so instead of losing the frame; nothing here waits.
"""

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from pearl.runtime.clock import Clock
from pearl.runtime.codec import Kind, pack
from pearl.runtime.errors import PeerGoneError, QueueFullError
from pearl.types import tcp_address

WATER_MARK = 256  # frames inside libzmq, a peer: keeps a pipe busy, small beside the bounded queues
READS_PER_TURN = 128  # then others on the loop get their turn
LINGER_MS = 200  # for what was sent just before closing; a host that is gone must not hold up the exit
# Plain integers: on the path of every frame an operation on an enum costs as much as the call.
_EVENTS, _POLLIN, _NOBLOCK = zmq.EVENTS.value, zmq.POLLIN.value, zmq.NOBLOCK.value
OVERSIZE = 2  # libzmq cuts a connection whose frame is this many times the limit; below it is refused by name


class ZmqSocket:
    """A ROUTER that listens or a DEALER that connects. Everything is called from the event loop.

    Args:
        on_frames: takes the parts of each message that arrives.
        on_room: called whenever a peer may take frames again, and often besides.
        on_failure: takes what the two raise: an exception inside a callback would only be logged by the loop.
    """

    def __init__(
        self,
        kind: int,
        max_frame_bytes: int,
        on_frames: Callable[[list[bytes]], None],
        on_room: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, OVERSIZE * max_frame_bytes)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a host that vanished leaves no route behind for ever
        self._on_frames = on_frames
        self._on_room = on_room
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._scheduled = False
        self.paused = False

    # life

    def bind(self, address: str) -> str:
        """Listen; returns the address with the port that was chosen for port 0. ValueError when it cannot be had."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else frames for a full or unknown peer vanish
        self._socket.setsockopt(zmq.IPV6, int(_needs_ipv6(address)))
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(
                f"cannot listen on runtime.address = {address!r}: {error.strerror or error}. Stop what uses that "
                "port, or set runtime.address to another one (port 0 = any free port)"
            ) from error
        self._watch()
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str, identity: bytes) -> None:
        """ValueError when ``address`` is none. Nobody has to listen there yet."""
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.IPV6, int(_needs_ipv6(address)))
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"cannot connect to {address!r}: {error.strerror or error}") from error
        self._watch()

    def close(self) -> None:
        """Close the socket; messages sent get LINGER_MS to leave, for which it may block the loop, never longer."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()

    def _watch(self) -> None:
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()  # an edge from before is lost

    # reading

    def pause(self) -> None:
        """Read nothing until ``resume``: the others' queues fill and slow them down."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._schedule()

    def poll(self) -> None:
        """Take everything that has arrived, now, unless paused."""
        if not self._socket.closed:
            self._read(itertools.count())

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        if not self._read(range(READS_PER_TURN)):
            self._schedule()
        if not self._socket.closed:
            self.guard(self._on_room)

    def _read(self, turns: "range | itertools.count[int]") -> bool:
        """False when there may be more."""
        for _ in turns:
            # Asking for the events also clears the descriptor's edge.
            if not self._is_readable() or self.paused:
                return True
            frames = self._socket.recv_multipart(_NOBLOCK)
            self.guard(self._on_frames, frames)
            if self._socket.closed:
                return True
        return False

    def guard(self, callback: Callable[..., None], *values: object) -> None:
        """Call from a callback of the loop."""
        try:
            callback(*values)
        except Exception as error:  # noqa: BLE001  # raised where someone waits, see on_failure
            self._on_failure(error)

    # sending

    def try_send(self, frames: Sequence[bytes]) -> bool:
        """False when the peer takes no frame now, PeerGoneError when it has no connection: it was not sent then."""
        try:
            self._socket.send_multipart(frames, _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGoneError("no connection") from None
        if self._is_readable():
            self._schedule()
        return True

    def _is_readable(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)


class Outbox:
    """Frames to one peer, numbered in the order they were put; those it does not take yet wait here, ``bound`` at
    most. ``send`` says whether it took a frame."""

    def __init__(self, peer: str, send: Callable[[bytes], bool], bound: int) -> None:
        self._peer = peer
        self._send = send
        self._bound = bound
        self._sequence = 0
        self._waiting: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._bound

    def put(self, kind: Kind, op: int, body: bytes) -> None:
        """Send, or keep until the peer takes it. Raises QueueFullError: it was not accepted."""
        if self.is_full:
            raise QueueFullError(
                f"{self._peer} does not take its messages: runtime.queue_messages = {self._bound} are waiting"
            )
        frame = pack(self._sequence, kind, op, body)
        self._sequence += 1
        if self._waiting or not self._send(frame):
            self._waiting.append(frame)

    def put_if_idle(self, kind: Kind, op: int, body: bytes) -> None:
        """Queue a message that the next of its kind replaces; skipped while others wait."""
        if not self._waiting:
            self.put(kind, op, body)

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        while self._waiting and self._send(self._waiting[0]):
            self._waiting.popleft()


class ReadPause:
    """Closes a port to reading while too much that was read is unhandled, and keeps the time it was closed."""

    def __init__(self, port: ZmqSocket, clock: Clock, bound: int) -> None:
        self._port = port
        self._clock = clock
        self._bound = bound
        self._deaf_s = 0.0
        self._deaf_since = 0.0

    @property
    def paused_s(self) -> float:
        """Seconds closed, in all."""
        return self._deaf_s + (self._clock.now() - self._deaf_since if self._port.paused else 0.0)

    def update(self, load: int) -> None:
        """Call whenever the number of unhandled messages changes: closed at the bound, open again at half of it."""
        if not self._port.paused and load >= self._bound:
            self._deaf_since = self._clock.now()
            self._port.pause()
        elif self._port.paused and load <= self._bound // 2:
            self._deaf_s = self.paused_s
            self._port.resume()


def _needs_ipv6(address: str) -> bool:
    """Return whether the host is an IPv6 address or a name that has no other: with the option set, libzmq tries IPv6
    alone."""
    try:
        where = tcp_address.parse(address)
    except ValueError:
        return False  # libzmq says what is wrong with it
    if where.ip is not None:
        return where.is_ipv6
    try:
        families = {family for family, *_ in socket.getaddrinfo(where.host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(families) and socket.AF_INET not in families
