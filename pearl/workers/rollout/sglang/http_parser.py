"""HTTP/1.1 answers, piece by piece, as much of it as SGLang's server speaks. Pure: bytes in, bodies out."""

import json
from collections.abc import Iterator
from typing import Any

MAX_HEAD_BYTES = 1 << 16
END = b"\r\n\r\n"


class HttpError(Exception):
    """What came is no answer that a well-behaved server gives."""


class AnswerParser:
    """One answer: ``feed`` bytes, take ``body`` pieces; ``is_done`` once all of it is in."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is in."""
        self.is_done = False
        self._buffer = bytearray()
        self._left: int | None = None  # bytes of the body or of the chunk still to come; None = till the end
        self._is_chunked = False

    def feed(self, data: bytes) -> bytes:
        """The part of the body that ``data`` completes. Raises HttpError."""
        self._buffer += data
        if not self.status and not self._take_head():
            return b""
        return b"".join(self._pieces())

    def close(self) -> None:
        """The server closed the connection. Raises HttpError when that came too early."""
        if not self.is_done and (not self.status or self._is_chunked or self._left):
            raise HttpError("the server closed the connection in the middle of an answer")
        self.is_done = True

    def _take_head(self) -> bool:
        head, end, rest = self._buffer.partition(END)
        if not end:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpError("an answer without an end to its head")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {
            key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)
        }
        words = first.split(" ")
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise HttpError(f"no answer of HTTP: {first[:80]!r}")
        self.status = int(words[1])
        self._is_chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        length = fields.get("content-length")
        self._left = 0 if self._is_chunked else int(length) if length is not None else None
        self._buffer = rest
        return True

    def _pieces(self) -> Iterator[bytes]:
        while not self.is_done:
            if self._left is None:
                yield bytes(self._buffer)
                self._buffer.clear()
                return
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: len(piece)]
            self._left -= len(piece)
            yield piece
            if self._left or (self._is_chunked and not self._next_chunk()):
                return
            self.is_done = self.is_done or not self._is_chunked

    def _next_chunk(self) -> bool:
        """Whether the size of the next chunk is in, or the end."""
        start = 2 if self._buffer.startswith(b"\r\n") else 0  # of the chunk before
        line, end, rest = self._buffer[start:].partition(b"\r\n")
        if not end:
            return False
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise HttpError(f"no size of a chunk: {bytes(line[:80])!r}") from None
        self._buffer = rest
        self.is_done = self._left == 0
        return True


class EventSplitter:
    """Server-sent events: the JSON value after each ``data:``; the last one, ``[DONE]``, is left out."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Any]:
        """Raises HttpError."""
        *lines, self._buffer = (self._buffer + data).split(b"\n\n")
        try:
            return [
                json.loads(line.removeprefix(b"data:"))
                for line in lines
                if line.startswith(b"data:") and line.removeprefix(b"data:").strip() != b"[DONE]"
            ]
        except ValueError as error:
            raise HttpError(f"an event that is no JSON: {error}") from None
