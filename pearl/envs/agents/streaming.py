"""A whole answer as the chunks of a stream: role, text, tool calls, finish reason, and usage when asked."""

from collections.abc import Iterator
from typing import Any

from pearl.envs.agents.completion import Completion


def chunks(completion: Completion, *, with_usage: bool) -> Iterator[dict[str, Any]]:
    choice = completion.choices[0]
    message = choice.message
    yield _chunk(completion, {"role": "assistant", "content": ""})
    if message.reasoning_content:
        yield _chunk(completion, {"reasoning_content": message.reasoning_content})
    if message.content:
        yield _chunk(completion, {"content": message.content})
    for index, call in enumerate(message.tool_calls or ()):
        yield _chunk(completion, {"tool_calls": [{"index": index, **call.model_dump()}]})
    yield _chunk(completion, {}, choice.finish_reason)
    if with_usage:
        yield _head(completion) | {"choices": [], "usage": completion.usage.model_dump()}


def _chunk(completion: Completion, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return _head(completion) | {"choices": [choice]}


def _head(completion: Completion) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": "chat.completion.chunk",
        "created": completion.created,
        "model": completion.model,
    }
