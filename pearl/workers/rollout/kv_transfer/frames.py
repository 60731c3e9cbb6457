"""What the two sides of a handing over say: tagged, typed, refused when malformed. Nothing is unpickled.

On the wire: 4 bytes of length, little-endian, then MessagePack; a ``Chunk`` is followed by its payload.

    prefill: Hello ... Offer, Chunk, Chunk, ...           at any time: Ping, Failed (then the connection ends)
    decode:                Grant             ... Done
"""

import struct

import msgspec

from pearl.types.weights import Version

MAX_FRAME_BYTES = 1 << 16
LENGTH = struct.Struct("<I")
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Layer(msgspec.Struct, frozen=True, array_like=True):
    index: int
    num_heads: int  # key-value heads
    key_size: int
    value_size: int


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """The payload of tokens [a, b): for each layer the keys [head, token, size], then the values."""

    dtype: str
    layers: tuple[Layer, ...]

    @property
    def bytes_per_token(self) -> int:
        """ValueError when the dtype is none that KV comes in."""
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"KV of dtype {self.dtype!r}; known are {', '.join(_ITEM_BYTES)}")
        elements = sum(layer.num_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return elements * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        first = self.layers[0] if self.layers else Layer(0, 0, 0, 0)
        sizes = f"{first.num_heads} heads of {first.key_size} + {first.value_size}"
        return f"{self.dtype}, {len(self.layers)} layers, {sizes}"


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all frames."""


class Hello(Frame, frozen=True):
    token: str  # of the address: an older process behind the same port had another one
    attempt: int
    sender: str


class Offer(Frame, frozen=True):
    """The prefill stage has its pages and computes; ``num_tokens`` of KV will come."""

    version: Version
    num_tokens: int
    layout: KvLayout


class Grant(Frame, frozen=True):
    """There are pages for it; tokens before ``start`` are there already."""

    start: int


class Chunk(Frame, frozen=True):
    attempt: int
    version: Version
    start: int
    count: int  # tokens, all layers
    num_bytes: int
    digest: bytes  # xxh3-128 of the payload


class Done(Frame, frozen=True):
    """All KV is in the decode worker's pages."""


class Failed(Frame, frozen=True):
    reason: str


class Ping(Frame, frozen=True):
    pass


AnyFrame = Hello | Offer | Grant | Chunk | Done | Failed | Ping
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyFrame)


def encode(frame: AnyFrame) -> bytes:
    body = _encoder.encode(frame)
    assert len(body) <= MAX_FRAME_BYTES, f"{type(frame).__name__} of {len(body)} bytes"
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray) -> AnyFrame:
    """Raises msgspec.MsgspecError (a ValueError) when it is none."""
    return _decoder.decode(body)
