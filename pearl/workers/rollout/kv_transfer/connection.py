"""A TCP connection between two workers: frames with a limit on each step, whatever goes wrong as one error."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

import numpy as np
import xxhash

from pearl.workers.rollout.kv_transfer.errors import KvTransferError
from pearl.workers.rollout.kv_transfer.frames import LENGTH, MAX_FRAME_BYTES, AnyFrame, decode, encode
from pearl.workers.rollout.kv_transfer.pages import Block


class Connection:
    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._is_broken = False  # in the middle of a frame, or closed: nothing can be said any more

    @classmethod
    async def open(cls, host: str, port: int, limit_s: float) -> Self:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connecting = socket.socket(family, socket.SOCK_STREAM)
        connecting.setblocking(False)
        try:
            async with _limited(limit_s, f"reaching {host}:{port}"):
                await asyncio.get_running_loop().sock_connect(connecting, (host, port))
            return cls(connecting)
        except BaseException:
            connecting.close()
            raise

    async def send(self, frame: AnyFrame, limit_s: float, payload: Block | None = None) -> None:
        if self._is_broken:
            raise KvTransferError("the connection is broken")
        self._is_broken = True
        async with _limited(limit_s, f"sending {type(frame).__name__}"):
            await self._loop.sock_sendall(self._socket, encode(frame))
            if payload is not None:
                await self._loop.sock_sendall(self._socket, payload.data)
        self._is_broken = False

    async def recv(self, limit_s: float) -> AnyFrame:
        async with _limited(limit_s, "hearing from the peer"):
            (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise KvTransferError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
            body = await self._exactly(length)
        try:
            return decode(body)
        except ValueError as error:
            raise KvTransferError(f"not a frame: {error}") from error

    async def fill(self, block: Block, limit_s: float) -> bytes:
        """Read as many bytes as fit into the block; their xxh3-128, taken of each piece while caches still hold it."""
        digest = xxhash.xxh3_128()
        async with _limited(limit_s, f"receiving {block.nbytes} bytes"):
            await self._fill(block.data, digest.update)
        return digest.digest()

    async def finish(self, frame: AnyFrame | None, limit_s: float) -> None:
        """Last words, if they can still be said; then until the peer has closed, so that they are not lost."""
        with contextlib.suppress(KvTransferError):
            if frame is not None:
                await self.send(frame, limit_s)
            async with _limited(limit_s, "parting"):
                self._socket.shutdown(socket.SHUT_WR)
                rest = np.empty(MAX_FRAME_BYTES, np.uint8)
                while await self._loop.sock_recv_into(self._socket, rest.data):
                    pass

    def close(self) -> None:
        self._is_broken = True
        self._socket.close()

    async def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        await self._fill(memoryview(data))
        return data

    async def _fill(self, view: memoryview, seen: Callable[[memoryview], None] | None = None) -> None:
        position = 0
        while position < len(view):
            count = await self._loop.sock_recv_into(self._socket, view[position:])
            if count == 0:
                raise KvTransferError("the peer closed the connection")
            if seen is not None:
                seen(view[position : position + count])
            position += count


@asynccontextmanager
async def _limited(limit_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise KvTransferError(f"{what} took over {limit_s:g} s") from None
    except OSError as error:
        raise KvTransferError(f"{what}: {error}") from error
