"""Chat messages as plain dictionaries in OpenAI's form, checked and brought into one shape.

A checked message has ``role`` and ``content`` (always text) and, where it applies, ``tool_calls`` (arguments as JSON
text), ``tool_call_id``, ``name`` and ``reasoning_content``. Keys that mean nothing to a chat template are dropped.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]
"""A function as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""

ROLES = ("system", "user", "assistant", "tool")


class MessageError(ValueError):
    """A message, or a list of them, is not in OpenAI's form; says where and what is wrong."""


def check_messages(messages: object, where: str = "messages") -> list[Message]:
    """The messages in one shape. Objects with ``model_dump`` (those of the ``openai`` package) are taken too."""
    if not isinstance(messages, list | tuple):
        raise MessageError(f"{where}: {type(messages).__name__}, a list of messages is needed")
    return [_check_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def check_tools(tools: object, where: str = "tools") -> list[Tool]:
    """The tools; each is a function with a name."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise MessageError(f"{where}: {type(tools).__name__}, a list of tools is needed")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not _is_name(function.get("name")):
            raise MessageError(
                f'{where}[{index}]: {{"type": "function", "function": {{"name": ...}}}} is needed'
            )
    return [dict(tool) for tool in tools]


def clean(text: str) -> str:
    """One half of a surrogate pair, which JSON can name and UTF-8 cannot, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def for_template(message: Message) -> Message:
    """Convert messages for chat templates: the arguments of tool calls are objects there, not JSON text."""
    if "tool_calls" not in message:
        return message
    return message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def is_same(one: Message, other: Message) -> bool:
    """Whether two checked messages say the same. White space around an assistant's text does not count, nor does
    thinking that was left away: agents drop both, and the tokens that were generated stay what they are."""
    if one["role"] != other["role"]:
        return False
    if one["role"] != "assistant":
        return one == other
    return one["content"].strip() == other["content"].strip() and _calls(one) == _calls(other)


def _calls(message: Message) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], _with_object(call)["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # text that is no JSON stays text
            arguments = json.loads(arguments)
    return call | {"function": function | {"arguments": arguments}}


def _check_message(given: object, where: str) -> Message:
    if hasattr(given, "model_dump"):
        given = given.model_dump()
    if not isinstance(given, Mapping):
        raise MessageError(f"{where}: {type(given).__name__}, an object with role and content is needed")
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in ROLES:
        raise MessageError(f"{where}.role: {given.get('role')!r} is not one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _text(given.get("content"), f"{where}.content")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = given.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise MessageError(f"{where}.{key}: {type(value).__name__}, text is needed")
            message[key] = value
    if given.get("tool_calls"):
        if role != "assistant":
            raise MessageError(f"{where}.tool_calls: only the assistant calls tools, this is the {role}")
        message["tool_calls"] = _check_calls(given["tool_calls"], f"{where}.tool_calls")
    return message


def _text(content: object, where: str) -> str:
    """Parts of text are joined; there are no pictures and no sound here."""
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, list | tuple):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise MessageError(f"{where}: {type(content).__name__}, text or a list of text parts is needed")


def _part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise MessageError(f"{where}: a part of type {kind!r}; only text is supported")
    return clean(text)


def _check_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Iterable):
        raise MessageError(f"{where}: {type(calls).__name__}, a list is needed")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not _is_name(function.get("name")):
            raise MessageError(f"{where}[{index}]: a function with a name is needed")
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        checked.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": text},
            }
        )
    return checked


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name)
