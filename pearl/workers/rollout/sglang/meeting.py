"""How the two halves of an attempt find each other before SGLang moves any KV.

The prefill half's worker calls the decode half's, at the address that came with the request, and offers: the version
of its weights, where SGLang's halves meet, and the room that is theirs alone. The other accepts or says why not. The
connection then stays until the KV is over, so that either half hears at once when the other fails. Lines of JSON.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import msgspec

from pearl.state.weights import Version
from pearl.workers.rollout.kv_transfer.address import KvAddress, parse
from pearl.workers.rollout.kv_transfer.errors import KvTransferError

log = logging.getLogger(__name__)

CONTACT_LIMIT_S = 10.0
"""From one half's request until the other half is there too."""
MAX_LINE_BYTES = 4096
MAX_STRANGERS = 256
"""Connections that have not said whose half they are, or whose half is not here yet."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    token: str  # of the address that was called
    attempt: int
    name: str  # of the prefill worker
    version: Version
    host: str  # where SGLang's halves meet
    port: int
    room: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Both halves may begin."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Over(msgspec.Struct, frozen=True, tag=True):
    """The KV is where it should be."""


Word = Offer | Accepted | Failed | Over
DECODER = msgspec.json.Decoder(Word)


@dataclass(slots=True)
class Half:
    """What one half of an attempt wants to be told. ``failed`` is told at most once, and nothing after it."""

    attempt: int
    kind: Literal["prefill", "decode"]
    begun: Callable[[Offer], str]
    """Decode: judge the offer, "" = accept it. Prefill: the offer was accepted; the answer does not count."""
    failed: Callable[[str], None]
    line: "Line | None" = None
    timer: asyncio.TimerHandle | None = None
    offer: Offer | None = None


class Line(asyncio.Protocol):
    """One connection, of whichever side."""

    def __init__(self, point: "MeetingPoint", half: Half | None = None) -> None:
        self.half = half
        self.said: Offer | None = None
        """By a stranger whose half is not here yet."""
        self._point = point
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._point.opened(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            self.close()
            return
        for line in lines:
            try:
                word = DECODER.decode(line)
            except msgspec.MsgspecError as error:
                log.warning("a half said what nobody understands: %s", error)
                self.close()
                return
            self._point.heard(self, word)

    def connection_lost(self, error: Exception | None) -> None:
        self._point.lost(self)

    def say(self, word: Word) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(msgspec.json.encode(word) + b"\n")

    def close(self) -> None:
        """What was said before still leaves."""
        if self._transport is not None:
            self._transport.close()


@dataclass
class MeetingPoint:
    """Where a worker's halves are met; listens from the start. ``host`` is what others call it."""

    bind_host: str
    host: str
    name: str  # rollout.SLOT.INCARNATION
    _halves: dict[int, Half] = field(default_factory=dict)
    _strangers: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server((self.bind_host, 0), backlog=MAX_STRANGERS)
        self.address = KvAddress(self.host, self._listener.getsockname()[1], secrets.token_hex(8))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Line(self), sock=self._listener)

    def close(self) -> None:
        """No half is told anything any more. Harmless when repeated."""
        for half in self._halves.values():
            self._let_go(half)
        self._halves.clear()
        for line in self._strangers:
            line.close()
        if hasattr(self, "_server"):
            self._server.close()
        self._listener.close()

    # What the engine says

    def expect(self, half: Half) -> None:
        """A decode half is here; its prefill half will call, or has."""
        self._add(half)
        for line in self._strangers:
            if line.said is not None and line.said.attempt == half.attempt:
                self._strangers.remove(line)
                self._judge(line, half, line.said)
                return

    async def offer(self, half: Half, address: str, offer: Offer) -> None:
        """A prefill half is here; call the other. ``offer.token`` is filled in."""
        self._add(half)
        try:
            place = parse(address)
            half.offer = msgspec.structs.replace(offer, token=place.token)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(CONTACT_LIMIT_S):
                _, line = await loop.create_connection(lambda: Line(self, half), place.host, place.port)
        except (OSError, KvTransferError) as error:
            self._fail(half, f"the decode worker at {address} cannot be reached: {error}")
            return
        half.line = line
        line.say(half.offer)

    def over(self, attempt: int) -> None:
        """Its KV is where it should be."""
        half = self._halves.pop(attempt, None)
        if half is not None:
            if half.line is not None:
                half.line.say(Over())
            self._let_go(half)

    def give_up(self, attempt: int, reason: str) -> None:
        """It failed here; the other half is told."""
        half = self._halves.pop(attempt, None)
        if half is not None:
            if half.line is not None:
                half.line.say(Failed(reason))
            self._let_go(half)

    # What lines say

    def opened(self, line: Line) -> None:
        if line.half is None:
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.pop(0).close()
            self._strangers.append(line)

    def heard(self, line: Line, word: Word) -> None:
        half = line.half
        match word:
            case Offer() if half is None and line.said is None:
                self._met(line, word)
            case Accepted() if half is not None and half.kind == "prefill":
                self._cancel_timer(half)
                assert half.offer is not None
                half.begun(half.offer)
            case Failed() if half is not None:
                self._fail(half, word.reason)
            case Over() if half is not None:
                self._halves.pop(half.attempt, None)
                self._let_go(half)
            case _:
                line.close()

    def lost(self, line: Line) -> None:
        if line in self._strangers:
            self._strangers.remove(line)
        if line.half is not None:
            self._fail(line.half, "the other half's worker is gone")

    def _met(self, line: Line, offer: Offer) -> None:
        if offer.token != self.address.token:
            line.say(Failed(f"this is {self.name}, another worker than the one that was meant"))
            line.close()
            return
        line.said = offer
        half = self._halves.get(offer.attempt)
        if half is not None and half.kind == "decode" and half.line is None:
            self._strangers.remove(line)
            self._judge(line, half, offer)

    def _judge(self, line: Line, half: Half, offer: Offer) -> None:
        half.line, line.half = line, half
        self._cancel_timer(half)
        reason = half.begun(offer)
        if reason:
            line.say(Failed(reason))
            self._fail(half, reason)
        else:
            line.say(Accepted())

    # Halves

    def _add(self, half: Half) -> None:
        loop = asyncio.get_running_loop()
        self._halves[half.attempt] = half
        other = "prefill" if half.kind == "decode" else "decode"
        reason = f"no {other} half was there within {CONTACT_LIMIT_S:g} s"
        half.timer = loop.call_later(CONTACT_LIMIT_S, self._fail, half, reason)

    def _fail(self, half: Half, reason: str) -> None:
        if self._halves.get(half.attempt) is half:
            del self._halves[half.attempt]
            self._let_go(half)
            half.failed(reason)

    def _let_go(self, half: Half) -> None:
        self._cancel_timer(half)
        line, half.line = half.line, None
        if line is not None:
            line.half = None
            line.close()

    def _cancel_timer(self, half: Half) -> None:
        if half.timer is not None:
            half.timer.cancel()
            half.timer = None
