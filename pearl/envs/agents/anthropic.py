"""Anthropic's messages API in front of the same exchange: blocks of text, tool use and tool results."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pearl.envs.agents.completion import ChatRequest, Completion, FinishReason, read_request
from pearl.envs.agents.errors import UnsupportedError
from pearl.envs.text.messages import Message, MessageError

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
_PASSED_ON = frozenset(
    ("max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "model", "service_tier")
)
_OWN = frozenset(("messages", "system", "tools", "stop_sequences", "tool_choice", "thinking"))


class AnthropicDialect:
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        for key, value in body.items():
            if key not in _PASSED_ON and key not in _OWN and value is not None:
                raise UnsupportedError(f"{key}: is not supported; remove it")
        choice = body.get("tool_choice")
        if choice is not None and (not isinstance(choice, Mapping) or choice.get("type") != "auto"):
            raise UnsupportedError(f'tool_choice: {choice!r}; the model chooses, use {{"type": "auto"}}')
        request = {key: value for key, value in body.items() if key in _PASSED_ON}
        request |= {
            "messages": _messages(body),
            "tools": _tools(body.get("tools")),
            "stop": body.get("stop_sequences") or None,
        }
        return read_request(request)

    def answer(self, completion: Completion) -> bytes:
        message = _head(completion) | {
            "content": _blocks(completion),
            "stop_reason": _STOP_REASONS[completion.choices[0].finish_reason],
        }
        message["usage"]["output_tokens"] = completion.usage.completion_tokens
        return json.dumps(message, ensure_ascii=False).encode()

    def stream(self, completion: Completion, body: Mapping[str, Any]) -> bytes:
        return b"".join(_event(event) for event in _events(completion))

    def refusal(self, status: int, code: str, text: str) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(status, "invalid_request_error")
        if code == "context_length_exceeded":
            text = f"prompt is too long: {text}"  # what clients of this API look for
        return {"type": "error", "error": {"type": kind, "message": f"{code}: {text}"}}

    def stream_refusal(self, status: int, code: str, text: str) -> bytes:
        return _event(self.refusal(status, code, text))


def _messages(body: Mapping[str, Any]) -> list[Message]:
    made: list[Message] = []
    if body.get("system"):
        made.append({"role": "system", "content": _text(body["system"], "system")})
    given = body.get("messages")
    if not isinstance(given, list):
        raise MessageError(f"messages: {type(given).__name__}, a list is needed")
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise MessageError(f'{where}: an object with the role "user" or "assistant" is needed')
        content = message.get("content")
        if message["role"] == "assistant":
            made.append(_assistant(content, f"{where}.content"))
        else:
            made += _user(content, f"{where}.content")
    return made


def _user(content: object, where: str) -> Iterator[Message]:
    """Tool results first, as the API wants them, then the text."""
    texts = []
    for block in _as_blocks(content, where):
        if block.get("type") == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": str(block.get("tool_use_id", "")),
                "content": _text(block.get("content") or "", where),
            }
        else:
            texts.append(block)
    if texts or not content:
        yield {"role": "user", "content": _text(texts, where)}


def _assistant(content: object, where: str) -> Message:
    texts, calls = [], []
    for block in _as_blocks(content, where):
        match block.get("type"):
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                continue
            case _:
                texts.append(block)
    message: Message = {"role": "assistant", "content": _text(texts, where)}
    return message | {"tool_calls": calls} if calls else message


def _as_blocks(content: object, where: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise MessageError(f"{where}: {type(content).__name__}, text or a list of blocks is needed")
    return content


def _text(content: object, where: str) -> str:
    parts = []
    for block in _as_blocks(content, where):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise MessageError(f"{where}: a block of type {block.get('type')!r}; only text is supported here")
        parts.append(block["text"])
    return "".join(parts)


def _tools(given: object) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise MessageError(f"tools: {type(given).__name__}, a list is needed")
    tools = []
    for index, tool in enumerate(given):
        if not isinstance(tool, Mapping) or "input_schema" not in tool:
            raise MessageError(f"tools[{index}]: an object with name and input_schema is needed")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
        tools.append({"type": "function", "function": function})
    return tools


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    message = completion.choices[0].message
    blocks: list[dict[str, Any]] = []
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
    return blocks


def _head(completion: Completion) -> dict[str, Any]:
    return {
        "id": completion.id,
        "type": "message",
        "role": "assistant",
        "model": completion.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": completion.usage.prompt_tokens, "output_tokens": 0},
    }


def _events(completion: Completion) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": _head(completion)}
    for index, block in enumerate(_blocks(completion)):
        if block["type"] == "text":
            opened, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            text = json.dumps(block["input"], ensure_ascii=False)
            opened, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_start", "index": index, "content_block": opened}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    reason = _STOP_REASONS[completion.choices[0].finish_reason]
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": reason, "stop_sequence": None},
        "usage": {"output_tokens": completion.usage.completion_tokens},
    }
    yield {"type": "message_stop"}


def _event(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
