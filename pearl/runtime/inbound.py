"""What comes out of ``Hub.receive``: messages of peers, and their coming and going."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pearl.state.messages.control import Hello


class Joined(NamedTuple):
    """The peer said hello and was let in; from now on it can be told and asked."""

    peer: str
    hello: Hello


class Lost(NamedTuple):
    """The hub found that frames from the peer were lost or broken and dropped it; the peer is told to end."""

    peer: str
    reason: str


class Told(NamedTuple):
    peer: str
    message: msgspec.Struct


class Asked(NamedTuple):
    """Call one of the two, once; an answer to a peer that is gone by then is dropped."""

    peer: str
    message: msgspec.Struct
    reply: Callable[[msgspec.Struct], None]
    fail: Callable[[Exception], None]  # the asker gets a RemoteError with its type and text


Inbound = Joined | Lost | Told | Asked
