"""How families of models write tool calls, read back from an answer's text.

Each format knows its own writing only. Text that begins a call and cannot be read is a failure with a reason, never
an exception: the model is to see it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

ToolFormat = Literal["hermes", "llama3", "mistral", "none"]
"""<tool_call>{"name", "arguments"}</tool_call> (Qwen, Hermes), {"name", "parameters"} as the whole answer (Llama 3),
[TOOL_CALLS] with a list or with name[ARGS]{...} (Mistral), and no tool calls at all."""


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class ParsedText(msgspec.Struct, frozen=True):
    """``content`` is what is left beside the calls. With a ``failure`` there are no calls and it is the whole text."""

    content: str
    calls: tuple[Call, ...] = ()
    failure: str = ""


class _UnreadableError(Exception):
    """A tool call was begun and cannot be read."""


def parse_calls(form: ToolFormat, text: str) -> ParsedText:
    try:
        return _PARSERS[form](text)
    except _UnreadableError as error:
        return ParsedText(text, failure=str(error))


def _hermes(text: str) -> ParsedText:
    begin, end = "<tool_call>", "</tool_call>"
    before, found, rest = text.partition(begin)
    if not found:
        return ParsedText(text)
    calls, outside = [], [before]
    while found:
        body, closed, rest = rest.partition(end)
        if not closed:
            raise _UnreadableError(f"{begin} is not closed by {end}")
        calls.append(_call(_object(body), "arguments"))
        between, found, rest = rest.partition(begin)
        outside.append(between)
    return ParsedText("".join(outside).strip(), tuple(calls))


def _llama3(text: str) -> ParsedText:
    body = text.strip().removeprefix("<|python_tag|>")
    if not body.startswith("{") or '"name"' not in body:
        return ParsedText(text)
    return ParsedText("", (_call(_object(body), "parameters"),))


_ARGUMENTS = re.compile(r"\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]{}\s]+)?\[ARGS\]")


def _mistral(text: str) -> ParsedText:
    content, *parts = text.split("[TOOL_CALLS]")
    if not parts:
        return ParsedText(text)
    calls: list[Call] = []
    for part in parts:
        named = _ARGUMENTS.match(part)
        if named:
            calls.append(Call(named["name"], _object(part[named.end() :])))
            continue
        listed = _json(part)
        if not isinstance(listed, list):
            raise _UnreadableError("[TOOL_CALLS] is not followed by a list of calls or by name[ARGS]{...}")
        calls += [_call(entry, "arguments") for entry in listed]
    if not calls:
        raise _UnreadableError("[TOOL_CALLS] is followed by an empty list")
    return ParsedText(content.strip(), tuple(calls))


def _none(text: str) -> ParsedText:
    return ParsedText(text)


_PARSERS: dict[ToolFormat, Callable[[str], ParsedText]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "none": _none,
}
TOOL_FORMATS = tuple(_PARSERS)


def write_calls(form: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Write calls as a model of this format would.

    Raises:
        ValueError: the format has no tool calls, or not so many.
    """
    if not calls:
        return ""
    named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    match form:
        case "hermes":
            return "\n".join(
                f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
                for name, arguments in named
            )
        case "llama3" if len(named) == 1:
            return json.dumps({"name": named[0][0], "parameters": named[0][1]})
        case "mistral":
            return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": args} for name, args in named])
    raise ValueError(f"{len(named)} tool calls in one answer cannot be written as {form}")


def _call(value: object, key: str) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _UnreadableError(f'a tool call is a JSON object with "name" and "{key}"')
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        raise _UnreadableError(f'"{key}" of the tool call {value["name"][:100]} is not a JSON object')
    return Call(value["name"], arguments)


def _object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise _UnreadableError("a tool call is a JSON object")
    return value


def _json(text: str) -> object:
    """Strict: NaN and the like are not JSON, and would not survive the next template."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"the tool call is not valid JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")
