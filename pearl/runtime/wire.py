"""A ZeroMQ socket on the event loop, by its file descriptor: several times cheaper than ``zmq.asyncio``.

The descriptor is edge-triggered: it says that *something* changed, so after every read of it and after every send
the socket is drained until it would block. Sending never blocks: what does not fit stays in the caller's queue.
"""

import asyncio
from collections.abc import Callable

import zmq

LINGER_MS = 200
"""How long closing waits for unsent messages: enough for a living peer on the network, nothing for a dead one."""
FRAMES_A_TURN = 256
"""Frames read before other tasks get their turn."""


class Wire:
    """``on_frames`` gets each multipart message; it is called on the loop and must not block."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._paused = False
        self._scheduled = False
        self._closed = False
        self.on_writable: Callable[[], None] | None = None
        self._loop.add_reader(self._fd, self._ready)
        self._schedule()

    def send(self, parts: list[bytes]) -> bool:
        """False when the peer's pipe is full. zmq.ZMQError(EHOSTUNREACH) when a ROUTER has no such peer."""
        try:
            self._socket.send_multipart(parts, flags=zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        finally:
            self._schedule()  # sending consumes the descriptor's edge
        return True

    def pause(self) -> None:
        """Read nothing more, so that senders feel it."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._schedule()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=LINGER_MS)

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _ready(self) -> None:
        if not self._scheduled:
            self._drain()

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(FRAMES_A_TURN):
            if self._paused or self._closed:
                return
            try:
                parts = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                if self.on_writable is not None:
                    self.on_writable()
                return
            self._on_frames(parts)
        self._schedule()
