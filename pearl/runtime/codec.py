"""Messages to bytes and back: MessagePack of tagged structs, checked against their types when read.

A frame is an envelope around one message: ``(sequence, kind, op, body)``. ``sequence`` counts the frames from one
side to the other without a hole, so that a lost frame is noticed by the next one; ``op`` ties an answer to what was
asked; ``body`` stays packed until the envelope is understood, so that a bad body can still be answered.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec

from pearl.runtime.errors import FrameTooLargeError, MalformedError
from pearl.types.error_text import error_text, escaped, without_surrogates

Message = TypeVar("Message")

MAX_ERROR_CHARS = 2000  # of an error's text on the wire
ENVELOPE_BYTES = 32  # more than an envelope adds: an array of four, three integers of nine bytes at most


class Kind(IntEnum):
    TELL = 0
    ASK = 1
    REPLY = 2
    ERROR = 3  # instead of a reply; the body is a Failure
    KEEPALIVE = 4  # the coordinator is there; no body
    REFUSAL = 5  # the coordinator does not know this peer (any more); the body is the reason


class Failure(msgspec.Struct, frozen=True, array_like=True):
    kind: str  # name of the exception's type
    text: str


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    kind: Kind
    op: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
# RecursionError: nested deeper than the decoder goes. UnicodeDecodeError: a string that is not UTF-8.
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(message: object) -> bytes:
    """One message, or a part of one, as MessagePack. A lone surrogate in any of its texts is escaped."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(without_surrogates(message))


def encode_bounded(message: object, max_frame_bytes: int) -> bytes:
    """Encode as ``encode`` does, within a limit.

    Raises:
        FrameTooLargeError: it would not fit into a frame.
    """
    try:
        body = encode(message)
        size = str(len(body))
    except ValueError as error:  # one field alone is beyond what the format can hold
        body, size = None, str(error)
    if body is None or len(body) + ENVELOPE_BYTES > max_frame_bytes:
        raise FrameTooLargeError(
            f"{type(message).__name__} of {size} bytes does not fit into runtime.max_frame_bytes = "
            f"{max_frame_bytes}: send it in parts or by reference, or raise the limit"
        )
    return body


def encode_failure(error: Exception) -> bytes:
    """The body of an ERROR."""
    return encode(Failure(type(error).__name__, error_text(error, MAX_ERROR_CHARS)))


def encode_reason(reason: str) -> bytes:
    """The body of a REFUSAL."""
    return encode(escaped(reason, MAX_ERROR_CHARS))


def pack(sequence: int, kind: Kind, op: int, body: bytes) -> bytes:
    return _encoder.encode((sequence, int(kind), op, msgspec.Raw(body)))


class Decoder(Generic[Message]):
    """Reads one of the types of ``union``, anything else is malformed.

    Args:
        union: a tagged struct type or a union of them.
        max_frame_bytes: larger input is refused unread.
    """

    def __init__(self, union: Any, max_frame_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self._max_frame_bytes = max_frame_bytes

    def decode(self, data: bytes | msgspec.Raw) -> Message:
        """Raises MalformedError, which names what is wrong."""
        size = memoryview(data).nbytes
        if size > self._max_frame_bytes:
            raise MalformedError(f"{size} bytes, more than runtime.max_frame_bytes = {self._max_frame_bytes}")
        try:
            return self._decoder.decode(data)
        except _MALFORMED as error:
            raise MalformedError(f"{error} (in {size} bytes)") from error


class FrameReader:
    """Reads envelopes and then, by their kind, bodies. All raise MalformedError."""

    def __init__(self, union: Any, max_frame_bytes: int) -> None:
        self._envelopes: Decoder[Envelope] = Decoder(Envelope, max_frame_bytes)
        self._messages: Decoder[msgspec.Struct] = Decoder(union, max_frame_bytes)
        self._failures: Decoder[Failure] = Decoder(Failure, max_frame_bytes)
        self._reasons: Decoder[str] = Decoder(str, max_frame_bytes)

    def envelope(self, frame: bytes) -> Envelope:
        return self._envelopes.decode(frame)

    def body(self, envelope: Envelope) -> msgspec.Struct:
        """A Failure when the kind is ERROR, otherwise one of the union."""
        if envelope.kind is Kind.ERROR:
            return self._failures.decode(envelope.body)
        return self._messages.decode(envelope.body)

    def reason(self, envelope: Envelope) -> str:
        return self._reasons.decode(envelope.body)


class Readers:
    """One reader for each kind of sender: what a kind never says, or a frame larger than it ever sends, is malformed
    before it costs anything.

    Args:
        messages: the types that senders may send, as a union, or a ``Sender`` for each kind.
        common: union of what all may send.
    """

    def __init__(self, messages: Any, common: Any, max_frame_bytes: int) -> None:
        self._everyone: FrameReader | None = None
        self._by_kind: dict[str, FrameReader] = {}
        if isinstance(messages, Mapping):
            for kind, sender in messages.items():
                most = min(sender.max_bytes or max_frame_bytes, max_frame_bytes)
                self._by_kind[kind] = FrameReader(sender.messages | common, most)
        else:
            self._everyone = FrameReader(messages | common, max_frame_bytes)

    def of(self, kind: str) -> FrameReader:
        return self._everyone or self._by_kind[kind]
