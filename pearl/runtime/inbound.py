"""What comes out of ``RpcServer.receive``: messages of peers, and their coming and going."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pearl.types.messages.control import Hello


class PeerJoined(NamedTuple):
    """The peer said hello and was let in; from now on it can be told and asked."""

    peer: str
    hello: Hello


class PeerLost(NamedTuple):
    """The server found that frames from the peer were lost or broken and dropped it; the peer is told to end."""

    peer: str
    reason: str


class Notification(NamedTuple):
    peer: str
    message: msgspec.Struct


class Call(NamedTuple):
    """Call one of the two, once; an answer to a peer that is gone by then is dropped."""

    peer: str
    message: msgspec.Struct
    reply: Callable[[msgspec.Struct], None]
    fail: Callable[[Exception], None]  # the asker gets a RemoteError with its type and text


Inbound = PeerJoined | PeerLost | Notification | Call
