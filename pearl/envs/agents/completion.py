"""What an agent asks for and gets, in the form of OpenAI's chat completions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from pearl.envs.agents.errors import UnsupportedError
from pearl.envs.text.messages import Message, Tool, check_messages, check_tools

FinishReason = Literal["stop", "length", "tool_calls"]
SAMPLING = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "repetition_penalty",
    )
)
"""The server's own: taken from the job, whatever a request says."""
MEANINGLESS = frozenset(
    (
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "timeout",
        "reasoning_effort",
        "stream",
        "stream_options",
        "extra_headers",
        "extra_query",
        "extra_body",
    )
)
"""Accepted, since clients send them, and of no effect on the answer."""


class ChatRequest(msgspec.Struct, frozen=True):
    messages: list[Message]
    tools: list[Tool]
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None  # of the answer; the job's own limit holds too


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of what is answered; ``model_dump`` as the ``openai`` package's objects have it."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = msgspec.to_builtins(self)
        return dumped


class FunctionCall(Record):
    name: str
    arguments: str


class ToolCall(Record, omit_defaults=False):
    id: str
    function: FunctionCall
    type: str = "function"


class AnswerMessage(Record, omit_defaults=False):
    role: str = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class Choice(Record, omit_defaults=False):
    message: AnswerMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class Usage(Record, omit_defaults=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(Record, omit_defaults=False):
    id: str
    choices: list[Choice]
    usage: Usage
    created: int
    model: str = "pearl"
    object: str = "chat.completion"


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request, checked.

    Raises:
        UnsupportedError: it asks for what is not offered.
        MessageError: messages or tools are not in OpenAI's form.
    """
    for key, value in body.items():
        if value is not None and key not in _READ and key not in SAMPLING and key not in MEANINGLESS:
            raise UnsupportedError(f"{key}: is not supported; remove it")
    if body.get("n", 1) not in (1, None):
        raise UnsupportedError(f"n: {body['n']!r}; one answer a request, use 1")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise UnsupportedError("logprobs: are kept for training and not sent to agents yet; remove it")
    if body.get("tool_choice") not in (None, "auto"):
        raise UnsupportedError(f'tool_choice: {body["tool_choice"]!r}; the model chooses, use "auto"')
    form = body.get("response_format")
    if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
        raise UnsupportedError('response_format: only {"type": "text"}; answers are not constrained')
    messages = check_messages(body.get("messages"))
    if not messages:
        raise UnsupportedError("messages: at least one is needed")
    return ChatRequest(messages, check_tools(body.get("tools")), _stop(body.get("stop")), _max_tokens(body))


_READ = frozenset(
    (
        "messages",
        "tools",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "logprobs",
        "top_logprobs",
        "tool_choice",
        "response_format",
    )
)


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    listed: Sequence[object] = (
        [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else [0]
    )
    if not all(isinstance(text, str) and text for text in listed):
        raise UnsupportedError(f"stop: {str(value)[:100]!r}; a text or a list of texts is needed")
    return tuple(str(text) for text in listed)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    given = [value for key in ("max_completion_tokens", "max_tokens") if (value := body.get(key)) is not None]
    for value in given:
        if type(value) is not int or value < 1:
            raise UnsupportedError(f"max_tokens: {value!r}; a whole number of at least 1 is needed")
    return min(given, default=None)
