"""Calls to one SGLang server on this host: whole answers to await, and streams of events to callbacks.

Without tasks: what a server says is handled as it comes in, on the event loop.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from pearl.workers.rollout.sglang.http_exchange import EventSplitter, HttpError, HttpExchange

HOST = "127.0.0.1"
CONNECT_LIMIT_S = 5.0


class ServerError(ValueError):
    """The server did not answer, or said no; the message names the call. A ValueError, as every failure of an engine
    is."""


class Answer(NamedTuple):
    status: int
    value: Any  # decoded JSON; text where it is none

    @property
    def is_good(self) -> bool:
        return self.status == 200


OnEvent = Callable[[Any], None]
OnEnd = Callable[[str], None]
"""Called once with "" after a whole answer, else what went wrong."""


class Stream(asyncio.Protocol):
    """One request that is answered by a stream of events."""

    def __init__(self, exchange: HttpExchange, on_event: OnEvent, on_end: OnEnd) -> None:
        self._answer = exchange
        self._on_event = on_event
        self._on_end: OnEnd | None = on_end
        self._events = EventSplitter()
        self._text = b""  # of an answer that is no stream
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._transport.write(self._answer.request)

    def data_received(self, data: bytes) -> None:
        try:
            body = self._answer.feed(data)
            if self._answer.status == 200:
                for event in self._events.feed(body):
                    if self._on_end is not None:
                        self._on_event(event)
            else:
                self._text += body
        except HttpError as error:
            self._end(str(error))
            return
        if self._answer.is_done:
            self._end(self._complaint())

    def connection_lost(self, error: Exception | None) -> None:
        if self._on_end is not None:
            self._end(str(error) if error else "the server closed the connection")

    def close(self) -> None:
        """Close the connection and call nobody any more. SGLang ends a request whose connection is closed."""
        self._on_end = None
        if self._transport is not None:
            self._transport.abort()

    def _complaint(self) -> str:
        if self._answer.status == 200:
            return ""
        return f"HTTP {self._answer.status}: {complaint(_decoded(self._text))}"

    def _end(self, reason: str) -> None:
        on_end = self._on_end
        self.close()
        if on_end is not None:
            on_end(reason)


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    async def call(self, method: str, path: str, body: Any = None, *, limit_s: float) -> Answer:
        """Raises ServerError when there is no answer within the limit."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._call(method, path, body)
        except TimeoutError:
            raise ServerError(f"{method} {path}: no answer within {limit_s:g} s") from None
        except (OSError, HttpError) as error:
            raise ServerError(f"{method} {path}: {error}") from error

    async def good(self, method: str, path: str, body: Any = None, *, limit_s: float) -> Any:
        """The value of a good answer. Raises ServerError otherwise."""
        answer = await self.call(method, path, body, limit_s=limit_s)
        if not answer.is_good:
            raise ServerError(f"{method} {path}: HTTP {answer.status}: {complaint(answer.value)}")
        return answer.value

    async def stream(self, path: str, body: Any, on_event: OnEvent, on_end: OnEnd) -> Stream:
        """Raises ServerError when the server cannot be reached."""
        loop = asyncio.get_running_loop()
        exchange = self._exchange("POST", path, body)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                _, stream = await loop.create_connection(
                    lambda: Stream(exchange, on_event, on_end), HOST, self.port
                )
        except OSError as error:  # TimeoutError is one
            raise ServerError(f"POST {path}: {error}") from error
        return stream

    async def _call(self, method: str, path: str, body: Any) -> Answer:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            exchange = self._exchange(method, path, body)
            writer.write(exchange.request)
            text = bytearray()
            while not exchange.is_done:
                text += exchange.feed(await reader.read(1 << 16))
            return Answer(exchange.status, _decoded(bytes(text)))
        finally:
            writer.close()

    def _exchange(self, method: str, path: str, body: Any) -> HttpExchange:
        return HttpExchange(method, path, body, host=f"{HOST}:{self.port}")


def complaint(value: Any) -> str:
    """Return the error text of an answer in one line."""
    if isinstance(value, dict):
        error = value.get("error", value)
        value = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(value).split())[:400]


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")
