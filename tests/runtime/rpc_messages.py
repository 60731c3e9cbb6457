"""Hubs and peers for tests: messages, peers that serve while a test talks to them, waits with a limit."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import zmq

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.codec import Decoder, Envelope, Kind, encode, pack
from pearl.runtime.errors import PeerGoneError, QueueFullError, RefusedError, RemoteError
from pearl.runtime.inbound import Notification, PeerJoined
from pearl.runtime.rpc_client import RpcClient
from pearl.runtime.rpc_server import RpcServer
from pearl.runtime.supervisor import TaskFailedError
from pearl.types.messages.control import Heartbeat, Hello

RUN_ID = "run"
LIMIT_S = 20.0  # far above what anything here takes
Item = TypeVar("Item")
Handler = Callable[[Any], Awaitable[msgspec.Struct | None]]


class Order(msgspec.Struct, frozen=True, tag=True):
    number: int
    payload: bytes = b""


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    payload: bytes = b""


Spoken = Order | Answer | Heartbeat


def make_server(**settings: Any) -> RpcServer:
    defaults: dict[str, Any] = {
        "run_id": RUN_ID,
        "messages": Spoken,
        "queue_messages": 1024,
        "max_frame_bytes": 1 << 20,
        "clock": MonotonicClock(),
        "keepalive_period_s": 0.05,
    }
    address = settings.pop("address", "tcp://127.0.0.1:0")
    return RpcServer(address, **(defaults | settings))


async def answer(order: Order) -> Answer:
    return Answer(order.number, order.payload)


def make_peer(
    address: str,
    handler: Handler = answer,
    *,
    slot: int = 0,
    incarnation: int = 1,
    run_id: str = RUN_ID,
    pid: int = 1,
    **settings: Any,
) -> RpcClient:
    defaults: dict[str, Any] = {
        "heartbeat": lambda: Heartbeat(progress=0),
        "messages": Order | Answer,
        "heartbeat_period_s": 0.05,
        "lease_s": LIMIT_S,
        "queue_messages": 1024,
        "max_frame_bytes": 1 << 20,
    }
    hello = Hello("rollout", slot, incarnation, "here", pid, run_id)
    return RpcClient(address, hello=hello, handler=handler, **(defaults | settings))


@asynccontextmanager
async def serving(*peers: RpcClient) -> AsyncIterator[list[asyncio.Task[str]]]:
    """The peers run; at the end those that still do are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(peer.run(), name=peer.name) for peer in peers]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()


async def within(awaitable: Awaitable[Item]) -> Item:
    async with asyncio.timeout(LIMIT_S):
        return await awaitable


async def next_one(server: RpcServer, kind: type[Item]) -> Item:
    """The next inbound of a kind; others, heartbeats mostly, are passed over."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            inbound = await server.receive()
            if isinstance(inbound, kind):
                return inbound


async def all_joined(server: RpcServer, count: int) -> list[str]:
    return [(await next_one(server, PeerJoined)).peer for _ in range(count)]


async def next_order(server: RpcServer) -> Order:
    """The next order that a peer told."""
    while True:
        told = await next_one(server, Notification)
        if isinstance(told.message, Order):
            return told.message


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until it holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the condition is somebody else's state
            await asyncio.sleep(0.001)


async def outcome(awaitable: Awaitable[object]) -> object:
    """What it returns, or the expected error that it raises."""
    try:
        return await within(awaitable)
    except (PeerGoneError, QueueFullError, RefusedError, RemoteError, TaskFailedError) as error:
        return error


class RawPeer:
    """A socket that speaks the protocol by hand, and breaks it at will."""

    def __init__(self, address: str, name: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._sequence = 0

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def say(self, kind: Kind, op: int, body: bytes) -> None:
        self.send(pack(self._sequence, kind, op, body))
        self._sequence += 1

    async def hear(self, kind: Kind) -> Envelope:
        """The next envelope of a kind."""
        frames = Decoder[Envelope](Envelope, 1 << 30)
        async with asyncio.timeout(LIMIT_S):
            while True:
                while not self._socket.poll(0):  # noqa: ASYNC110 - a plain socket, which the loop does not watch
                    await asyncio.sleep(0.001)
                envelope = frames.decode(self._socket.recv())
                if envelope.kind is kind:
                    return envelope

    async def join(self, hello: Hello) -> None:
        self.say(Kind.ASK, 1, encode(hello))
        await self.hear(Kind.REPLY)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


async def call(server: RpcServer, peer: str, number: int, deadline_s: float = LIMIT_S) -> Answer:
    return await within(server.call(peer, Order(number), deadline_s=deadline_s, reply_type=Answer))
