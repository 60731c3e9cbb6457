"""One HTTP/1.1 request to SGLang's server and its answer, without a socket: bytes to send, bytes received (h11)."""

import json
from typing import Any

import h11


class HttpError(Exception):
    """The server's answer is malformed or was cut off."""


class HttpExchange:
    """A request, ready to be sent as ``request``, and the answer that ``feed`` collects; ``is_done`` once it is whole.

    Args:
        body: sent as JSON; None sends an empty body.
    """

    def __init__(self, method: str, path: str, body: Any, *, host: str) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        headers = {
            "Host": host,
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
        }
        self._connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target=path, headers=list(headers.items()))
        parts = [request, h11.Data(data=content), h11.EndOfMessage()]
        self.request = b"".join(self._connection.send(part) or b"" for part in parts)
        self.status = 0
        """0 until the head of the answer is in."""
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the server and return the part of the body that they complete; b"" = the server closed.

        Raises:
            HttpError: the answer is malformed or ended too early.
        """
        if self.is_done:
            return b""
        if not data and not self.status:
            raise HttpError("the server closed the connection before it answered")
        body = bytearray()
        try:
            self._connection.receive_data(data)
            while not self.is_done:
                match self._connection.next_event():
                    case h11.Response(status_code=status):
                        self.status = status
                    case h11.Data(data=piece):
                        body += piece
                    case h11.EndOfMessage():
                        self.is_done = True
                    case h11.NEED_DATA:
                        break
        except h11.RemoteProtocolError as error:
            raise HttpError(f"not a valid HTTP answer: {error}") from error
        return bytes(body)


class EventSplitter:
    """Splits server-sent events into the JSON value after each ``data:``, without the last one, ``[DONE]``."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Any]:
        """Return the events that ``data`` completes. Raises HttpError when one is not JSON."""
        *lines, self._buffer = (self._buffer + data).split(b"\n\n")
        try:
            return [
                json.loads(line.removeprefix(b"data:"))
                for line in lines
                if line.startswith(b"data:") and line.removeprefix(b"data:").strip() != b"[DONE]"
            ]
        except ValueError as error:
            raise HttpError(f"an event is not JSON: {error}") from None
