import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.runtime.codec import (
    ENVELOPE_BYTES,
    Decoder,
    Failure,
    FrameReader,
    Kind,
    encode,
    encode_bounded,
    encode_failure,
    pack,
)
from pearl.runtime.errors import FrameTooLargeError, MalformedError
from pearl.types.messages.control import ControlMessage, Heartbeat, Hello, Shutdown, StartGroup

LIMIT = 1 << 16
HELLO = Hello("rollout", 1, 2, "host", 3, "run")


def decoder() -> Decoder[Any]:
    return Decoder(ControlMessage, LIMIT)


@pytest.mark.parametrize(
    "message", [HELLO, Heartbeat(1, "loading", 2), StartGroup("g", "m", ("a",), {"k": "v"}, 0, "/")]
)
def test_messages_come_back_as_what_they_were(message: msgspec.Struct) -> None:
    assert decoder().decode(encode(message)) == message


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"type": "Nonsense"}, "Nonsense"),
        ({"type": "Heartbeat"}, "progress"),
        ({"type": "Heartbeat", "progress": "many"}, r"\$\.progress"),
        ({"type": "Hello", "kind": "ghost"}, "ghost"),
        ([1, 2], "array"),
    ],
)
def test_what_is_malformed_is_named(value: object, wrong: str) -> None:
    with pytest.raises(MalformedError, match=wrong):
        decoder().decode(encode(value))


@pytest.mark.parametrize("data", [b"", encode(HELLO)[:-1], encode(HELLO) + b"\x00", b"\xc1", b"\x91" * 5000])
def test_cut_and_broken_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decoder().decode(data)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    reader = FrameReader(ControlMessage, LIMIT)
    with contextlib.suppress(MalformedError):
        reader.body(reader.envelope(data))


@given(st.integers(0, 400), st.binary(max_size=1))
def test_no_damaged_frame_raises_anything_else(at: int, value: bytes) -> None:
    frame = bytearray(pack(7, Kind.ASK, 9, encode(HELLO)))
    at %= len(frame)
    frame[at : at + 1] = value
    reader = FrameReader(ControlMessage, LIMIT)
    with contextlib.suppress(MalformedError):
        reader.body(reader.envelope(bytes(frame)))


def test_an_envelope_carries_its_message_and_never_more_than_its_allowance() -> None:
    body = encode(HELLO)
    frame = pack(2**63, Kind.REPLY, 2**63, body)
    assert len(frame) - len(body) <= ENVELOPE_BYTES
    reader = FrameReader(ControlMessage, LIMIT)
    envelope = reader.envelope(frame)
    assert (envelope.sequence, envelope.kind, envelope.op) == (2**63, Kind.REPLY, 2**63)
    assert reader.body(envelope) == HELLO


def test_a_failure_keeps_type_and_text_and_is_bounded() -> None:
    reader = FrameReader(ControlMessage, LIMIT)
    failure = reader.body(reader.envelope(pack(0, Kind.ERROR, 1, encode_failure(KeyError("x" * 100_000)))))
    assert isinstance(failure, Failure)
    assert failure.kind == "KeyError"
    assert len(failure.text) == 2000


@pytest.mark.scenario("MQ-06")
def test_a_message_over_the_limit_is_refused_with_the_limit_named() -> None:
    with pytest.raises(FrameTooLargeError, match=f"Hello of .* runtime.max_frame_bytes = {LIMIT}"):
        encode_bounded(Hello("rollout", 1, 2, "h" * LIMIT, 3, "run"), LIMIT)
    with pytest.raises(MalformedError, match=f"runtime.max_frame_bytes = {LIMIT}"):
        decoder().decode(encode("h" * LIMIT))
    fits = Shutdown("h" * (LIMIT - 200))
    assert decoder().decode(encode_bounded(fits, LIMIT)) == fits


def test_a_lone_surrogate_is_escaped_and_not_called_too_large() -> None:
    message = StartGroup("g", "m", ("\ud800",), {"k": "\udcff"}, 0, "/")
    body = encode_bounded(message, LIMIT)
    assert decoder().decode(body) == StartGroup("g", "m", (r"\ud800",), {"k": r"\udcff"}, 0, "/")


def test_the_error_of_a_handler_always_has_a_body() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    for error in (ValueError("a\ud800\0"), Unprintable(), ValueError("x" * 10_000_000)):
        failure = Decoder[Failure](Failure, LIMIT).decode(encode_failure(error))
        assert failure.kind == type(error).__name__
        assert failure.text
