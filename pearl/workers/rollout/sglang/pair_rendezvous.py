"""How the two stages of an attempt find each other before SGLang moves any KV.

The prefill stage's worker calls the decode stage's, at the address that came with the request, and offers: the version
of its weights, where SGLang's stages meet, and the room that is theirs alone. The other accepts or says why not. The
connection then stays until the KV is over, so that either stage hears at once when the other fails. Lines of JSON.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import msgspec

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.address import KvAddress, parse
from pearl.workers.rollout.kv_transfer.errors import KvTransferError

log = logging.getLogger(__name__)

CONTACT_LIMIT_S = 10.0
"""From one stage's request until the other stage is there too."""
MAX_LINE_BYTES = 4096
MAX_STRANGERS = 256
"""Connections that have not said whose stage they are, or whose stage is not here yet."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    token: str  # of the address that was called
    attempt: int
    name: str  # of the prefill worker
    version: Version
    host: str  # where SGLang's stages meet
    port: int
    room: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Both stages may begin."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Over(msgspec.Struct, frozen=True, tag=True):
    """The KV is where it should be."""


PairMessage = Offer | Accepted | Failed | Over
DECODER = msgspec.json.Decoder(PairMessage)


@dataclass(slots=True)
class PairStage:
    """What one stage of an attempt wants to be told. ``failed`` is told at most once, and nothing after it."""

    attempt: int
    kind: Literal["prefill", "decode"]
    begun: Callable[[Offer], str]
    """Decode: judge the offer, "" = accept it. Prefill: the offer was accepted; the answer does not count."""
    failed: Callable[[str], None]
    line: "PairConnection | None" = None
    timer: asyncio.TimerHandle | None = None
    offer: Offer | None = None


class PairConnection(asyncio.Protocol):
    """One connection, of whichever side."""

    def __init__(self, point: "PairRendezvous", stage: PairStage | None = None) -> None:
        self.stage = stage
        self.said: Offer | None = None
        """By a stranger whose stage is not here yet."""
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
                log.warning("a stage sent an unknown message: %s", error)
                self.close()
                return
            self._point.heard(self, word)

    def connection_lost(self, error: Exception | None) -> None:
        self._point.lost(self)

    def say(self, word: PairMessage) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(msgspec.json.encode(word) + b"\n")

    def close(self) -> None:
        """Close the connection; messages already sent still leave."""
        if self._transport is not None:
            self._transport.close()


@dataclass
class PairRendezvous:
    """Where a worker's stages are met; listens from the start. ``host`` is what others call it."""

    bind_host: str
    host: str
    name: str  # rollout.SLOT.INCARNATION
    _stages: dict[int, PairStage] = field(default_factory=dict)
    _strangers: list[PairConnection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server((self.bind_host, 0), backlog=MAX_STRANGERS)
        self.address = KvAddress(self.host, self._listener.getsockname()[1], secrets.token_hex(8))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: PairConnection(self), sock=self._listener)

    def close(self) -> None:
        """No stage is told anything any more. Harmless when repeated."""
        for stage in self._stages.values():
            self._let_go(stage)
        self._stages.clear()
        for line in self._strangers:
            line.close()
        if hasattr(self, "_server"):
            self._server.close()
        self._listener.close()

    # What the engine says

    def expect(self, stage: PairStage) -> None:
        """A decode stage is here; its prefill stage will call, or has."""
        self._add(stage)
        for line in self._strangers:
            if line.said is not None and line.said.attempt == stage.attempt:
                self._strangers.remove(line)
                self._judge(line, stage, line.said)
                return

    async def offer(self, stage: PairStage, address: str, offer: Offer) -> None:
        """A prefill stage is here; call the other. ``offer.token`` is filled in."""
        self._add(stage)
        try:
            place = parse(address)
            stage.offer = msgspec.structs.replace(offer, token=place.token)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(CONTACT_LIMIT_S):
                _, line = await loop.create_connection(
                    lambda: PairConnection(self, stage), place.host, place.port
                )
        except (OSError, KvTransferError) as error:
            self._fail(stage, f"the decode worker at {address} cannot be reached: {error}")
            return
        stage.line = line
        line.say(stage.offer)

    def over(self, attempt: int) -> None:
        """Note that the attempt's KV has arrived."""
        stage = self._stages.pop(attempt, None)
        if stage is not None:
            if stage.line is not None:
                stage.line.say(Over())
            self._let_go(stage)

    def give_up(self, attempt: int, reason: str) -> None:
        """Note that the attempt failed here, and notify the other stage."""
        stage = self._stages.pop(attempt, None)
        if stage is not None:
            if stage.line is not None:
                stage.line.say(Failed(reason))
            self._let_go(stage)

    # What lines say

    def opened(self, line: PairConnection) -> None:
        if line.stage is None:
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.pop(0).close()
            self._strangers.append(line)

    def heard(self, line: PairConnection, word: PairMessage) -> None:
        stage = line.stage
        match word:
            case Offer() if stage is None and line.said is None:
                self._met(line, word)
            case Accepted() if stage is not None and stage.kind == "prefill":
                self._cancel_timer(stage)
                assert stage.offer is not None
                stage.begun(stage.offer)
            case Failed() if stage is not None:
                self._fail(stage, word.reason)
            case Over() if stage is not None:
                self._stages.pop(stage.attempt, None)
                self._let_go(stage)
            case _:
                line.close()

    def lost(self, line: PairConnection) -> None:
        if line in self._strangers:
            self._strangers.remove(line)
        if line.stage is not None:
            self._fail(line.stage, "the other stage's worker is gone")

    def _met(self, line: PairConnection, offer: Offer) -> None:
        if offer.token != self.address.token:
            line.say(Failed(f"this is {self.name}, another worker than the one that was meant"))
            line.close()
            return
        line.said = offer
        stage = self._stages.get(offer.attempt)
        if stage is not None and stage.kind == "decode" and stage.line is None:
            self._strangers.remove(line)
            self._judge(line, stage, offer)

    def _judge(self, line: PairConnection, stage: PairStage, offer: Offer) -> None:
        stage.line, line.stage = line, stage
        self._cancel_timer(stage)
        reason = stage.begun(offer)
        if reason:
            line.say(Failed(reason))
            self._fail(stage, reason)
        else:
            line.say(Accepted())

    # PairedRequests

    def _add(self, stage: PairStage) -> None:
        loop = asyncio.get_running_loop()
        self._stages[stage.attempt] = stage
        other = "prefill" if stage.kind == "decode" else "decode"
        reason = f"no {other} stage was there within {CONTACT_LIMIT_S:g} s"
        stage.timer = loop.call_later(CONTACT_LIMIT_S, self._fail, stage, reason)

    def _fail(self, stage: PairStage, reason: str) -> None:
        if self._stages.get(stage.attempt) is stage:
            del self._stages[stage.attempt]
            self._let_go(stage)
            stage.failed(reason)

    def _let_go(self, stage: PairStage) -> None:
        self._cancel_timer(stage)
        line, stage.line = stage.line, None
        if line is not None:
            line.stage = None
            line.close()

    def _cancel_timer(self, stage: PairStage) -> None:
        if stage.timer is not None:
            stage.timer.cancel()
            stage.timer = None
