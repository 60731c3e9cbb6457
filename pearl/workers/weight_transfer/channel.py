"""What the two ends of a link say to each other beside the data: small typed frames over one TCP connection.

The connection lives as long as the link and is its identity: when either end closes it, the link is over.
A receive is posted only after the source announced the bucket, so that no idle wait counts against a limit.
"""

import socket
import struct
from typing import Literal

import msgspec

from pearl.types.weights import Version
from pearl.workers.weight_transfer.errors import LinkError

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 10
TELL_TIMEOUT_S = 5.0
"""Frames fit the socket's buffer, so that telling does not wait for the peer; if it ever did, not for long."""
Backend = Literal["gloo", "nccl"]


class LinkKey(msgspec.Struct, frozen=True, array_like=True):
    """Names a link for life: ``(source, its incarnation) -> (slot, its incarnation)``."""

    source: int
    source_incarnation: int
    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.source}.{self.source_incarnation}-{self.slot}.{self.incarnation}"


class Open(msgspec.Struct, frozen=True, tag=True):
    """Receiver's first frame."""

    key: LinkKey


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Build the link now, under ``prefix`` in the store at ``store_port`` of the source's address."""

    backend: Backend
    store_port: int
    prefix: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """No link; the connection is closed."""

    reason: str


class Request(msgspec.Struct, frozen=True, tag=True):
    """Send this version. ``deadline_s`` bounds every bucket, at both ends."""

    version: Version
    deadline_s: float


class BucketReady(msgspec.Struct, frozen=True, tag=True):
    """Bucket ``index`` is the next message on the link: post its receive."""

    index: int


class Superseded(msgspec.Struct, frozen=True, tag=True):
    """Nothing more of the requested version comes; the link stays good."""

    latest: Version | None


class PushResult(msgspec.Struct, frozen=True, tag=True):
    """Receiver's last frame of a push: whole and verified when ``error`` is empty."""

    version: Version
    error: str


Frame = Open | Opened | Refused | Request | BucketReady | Superseded | PushResult


class Channel:
    """One end of the connection. Every call is bounded by the socket's timeout; failures are LinkErrors."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(Frame)

    @property
    def local_address(self) -> str:
        """This host's address as seen on the way to the peer: a real one, of one interface."""
        return str(self._socket.getsockname()[0])

    def send(self, frame: Frame) -> None:
        data = msgspec.msgpack.encode(frame)
        try:
            self._socket.settimeout(TELL_TIMEOUT_S)
            self._socket.sendall(HEADER.pack(len(data)) + data)
        except OSError as error:
            raise LinkError(f"the peer is gone: {error}") from error

    def recv(self, timeout_s: float | None) -> Frame:
        """The next frame; None waits until the connection is closed by either end."""
        try:
            self._socket.settimeout(timeout_s)
        except OSError as error:
            raise LinkError("the link is closed") from error
        (length,) = HEADER.unpack(self._read(HEADER.size))
        if length > MAX_FRAME_BYTES:
            raise LinkError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}: not a peer of ours")
        try:
            return self._decoder.decode(self._read(length))
        except msgspec.DecodeError as error:
            raise LinkError(f"malformed frame: {error}") from error

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            try:
                piece = self._socket.recv(num_bytes - len(data))
            except TimeoutError as error:
                raise LinkError(f"silent for {self._socket.gettimeout()} s") from error
            except OSError as error:
                raise LinkError(f"the peer is gone: {error}") from error
            if not piece:
                raise LinkError("the peer closed the link")
            data += piece
        return data

    def close(self) -> None:
        """Wakes a thread of ours inside ``hear``, and the peer. Harmless when repeated."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # never connected, or closed before
        finally:
            self._socket.close()
