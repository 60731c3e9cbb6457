"""What differs between the HTTP APIs that agents speak: how a request is read, and how answers and refusals look."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from pearl.envs.agents.completion import ChatRequest, Completion, read_request
from pearl.envs.agents.streaming import chunks


class Dialect(Protocol):
    keep_alive: bytes  # sent in a stream while the answer is not there yet

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """The request, checked: RequestError or ValueError when it is not in order."""

    def answer(self, completion: Completion) -> bytes:
        """The JSON of a whole answer."""

    def stream(self, completion: Completion, body: Mapping[str, Any]) -> bytes:
        """The events of a streamed answer."""

    def refusal(self, status: int, code: str, text: str) -> dict[str, Any]:
        """The JSON object of a refusal."""

    def stream_refusal(self, status: int, code: str, text: str) -> bytes:
        """The events that end a stream without an answer."""


class OpenAiDialect:
    """Chat completions."""

    keep_alive = b": the answer is not there yet\n\n"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        return read_request(body)

    def answer(self, completion: Completion) -> bytes:
        return msgspec.json.encode(completion)

    def stream(self, completion: Completion, body: Mapping[str, Any]) -> bytes:
        options = body.get("stream_options")
        with_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        return _data(chunks(completion, with_usage=with_usage))

    def refusal(self, status: int, code: str, text: str) -> dict[str, Any]:
        return {"error": {"message": text, "type": "invalid_request_error", "code": code, "param": None}}

    def stream_refusal(self, status: int, code: str, text: str) -> bytes:
        return _data([self.refusal(status, code, text)])


def _data(parts: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
