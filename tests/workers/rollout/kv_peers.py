"""Both ends of the KV transport for its tests: an engine that remembers, and a peer that speaks frames by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import (
    LENGTH,
    AnyFrame,
    Chunk,
    Hello,
    KvLayout,
    Layer,
    Offer,
    Ping,
    decode,
    encode,
)
from pearl.workers.rollout.kv_transfer.limits import KvLimits
from pearl.workers.rollout.kv_transfer.pages import Begin, Block, Ended, Expect, Granted, Landed, Ready
from pearl.workers.rollout.kv_transfer.transport import KvTransport

LIMIT_S = 20.0
VERSION = Version(0, 1)
LAYOUT = KvLayout("float32", (Layer(0, 2, 16, 16),))
WIDTH = LAYOUT.bytes_per_token
QUICK = KvLimits(
    connect_s=0.5,
    contact_s=0.3,
    silence_s=0.4,
    ping_s=0.05,
    chunk_s=0.3,
    wait_s=1.5,
    engine_s=0.4,
    farewell_s=0.2,
)


def kv(start: int, count: int) -> Block:
    return np.repeat(np.arange(start, start + count) % 251, WIDTH).astype(np.uint8)


@dataclass
class FakeEngine:
    """Both sides of pages; grants at once, and holds what it is told to hold."""

    start: int = 0
    grants: bool = True
    landing: asyncio.Event = field(default_factory=asyncio.Event)
    landed: dict[int, list[Block]] = field(default_factory=dict)
    totals: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    read_bytes: int = 0
    landed_bytes: int = 0
    most_ahead: int = 0
    other: "FakeEngine | None" = None
    transport: KvTransport | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, attempt: int, start: int, count: int) -> Block | None:
        self.read_bytes += count * WIDTH
        if self.other is not None:
            self.most_ahead = max(self.most_ahead, self.read_bytes - self.other.landed_bytes)
        return kv(start, count)

    async def sent(self, attempt: int) -> None:
        self._outcome(attempt, "sent")

    async def offered(self, attempt: int, offer: Offer) -> None:
        self.totals[attempt] = offer.num_tokens
        if self.grants:
            self._post(Granted(attempt, self.start))
            if self.start == offer.num_tokens:
                self._land(attempt)

    async def land(self, attempt: int, version: Version, start: int, count: int, data: Block) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._wait(), self.loop))
        blocks = self.landed.setdefault(attempt, [])
        blocks.append(data.copy())
        self.landed_bytes += data.nbytes
        if start + count == self.totals[attempt]:
            self._land(attempt)

    async def failed(self, attempt: int, reason: str) -> None:
        self._outcome(attempt, reason)

    async def outcome(self, attempt: int) -> str:
        async with asyncio.timeout(LIMIT_S):
            while attempt not in self.outcomes:
                self.told.clear()
                await self.told.wait()
        return self.outcomes[attempt]

    def begin(self, attempt: int, address: str, tokens: int) -> None:
        self._post(Begin(attempt, address))
        self._post(Ready(attempt, tokens, tokens, VERSION, LAYOUT))

    def expect(self, attempt: int) -> None:
        self._post(Expect(attempt, "rollout.0.1"))

    def end(self, attempt: int, reason: str) -> None:
        self._post(Ended(attempt, reason))

    async def _wait(self) -> None:
        await self.landing.wait()

    def _land(self, attempt: int) -> None:
        self._post(Landed(attempt))
        self._outcome(attempt, "landed")

    def _post(self, notice: Begin | Ready | Expect | Granted | Landed | Ended) -> None:
        assert self.transport is not None
        self.transport.post([notice])

    def _outcome(self, attempt: int, outcome: str) -> None:
        assert attempt not in self.outcomes, f"{self.outcomes[attempt]}, then {outcome}"
        self.outcomes[attempt] = outcome
        self.loop.call_soon_threadsafe(self.told.set)


@asynccontextmanager
async def engines(
    count: int, limits: KvLimits | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[list[FakeEngine]]:
    found = []
    for index in range(count):
        engine = FakeEngine()
        engine.landing.set()
        engine.transport = KvTransport(host, host, f"rollout.{index}.1", limits)
        engine.transport.start(engine)
        found.append(engine)
    try:
        yield found
        for engine in found:
            assert engine.transport is not None
            await quiet(engine.transport)
            assert engine.transport.staged_bytes == 0
    finally:
        for engine in found:
            assert engine.transport is not None
            await asyncio.to_thread(engine.transport.close)


async def quiet(transport: KvTransport) -> None:
    """Its last conversation is over: bounded by what parting may take."""
    async with asyncio.timeout(LIMIT_S):
        while transport.num_conversations:
            await asyncio.to_thread(transport.post, [])


def address_of(engine: FakeEngine) -> str:
    assert engine.transport is not None
    return str(engine.transport.address)


class RpcClient:
    """A side that says what a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, frame: AnyFrame | bytes, payload: bytes = b"") -> None:
        self.writer.write((frame if isinstance(frame, bytes) else encode(frame)) + payload)

    async def hear(self) -> AnyFrame:
        async with asyncio.timeout(LIMIT_S):
            while True:
                (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
                frame = decode(await self.reader.readexactly(length))
                if isinstance(frame, Chunk):
                    await self.reader.readexactly(frame.num_bytes)
                if not isinstance(frame, Ping):
                    return frame


@asynccontextmanager
async def prefill_peer(
    engine: FakeEngine, attempt: int, token: str | None = None
) -> AsyncIterator[RpcClient]:
    assert engine.transport is not None
    address = engine.transport.address
    peer = RpcClient(*await asyncio.open_connection(address.host, address.port))
    peer.say(Hello(address.token if token is None else token, attempt, "rollout.0.1"))
    yield peer
    peer.writer.close()


@asynccontextmanager
async def decode_peer() -> AsyncIterator[tuple[str, "asyncio.Future[RpcClient]"]]:
    met: asyncio.Future[RpcClient] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda r, w: met.set_result(RpcClient(r, w)), "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}/token", met
    server.close()
    (await met).writer.close()


def chunk(start: int, count: int, **changes: object) -> Chunk:
    data = kv(start, count)
    whole = Chunk(1, VERSION, start, count, data.nbytes, xxhash.xxh3_128_digest(data.data))
    return msgspec.structs.replace(whole, **changes)
