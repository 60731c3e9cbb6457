"""Proves on made-up conversations that a chat template only appends, and that a tool format is the template's own.

A conversation is checked turn by turn: what is rendered up to the next answer must begin with what was rendered up to
the last one, then that answer, then the glue that ``Chat`` makes; as text and as ids.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from pearl.envs.text.chat import Chat
from pearl.envs.text.messages import Message, Tool
from pearl.envs.text.template import ChatTemplate, RenderError
from pearl.envs.text.tokenizer import TextTokenizer
from pearl.envs.text.tools import TOOL_FORMATS, ToolFormat, parse_calls

Kind = Literal["tool", "user", "tool after thinking", "user after thinking", "tool after a bad call"]
"""What may follow an answer: a tool's result, another user's message, either with thinking in the context, or a
tool's result where no call was read."""

TOOLS: tuple[Tool, ...] = (
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "What to look up."}},
                "required": ["word"],
            },
        },
    },
)
ARGUMENTS = {"word": "quartz", "depth": [1, {"exact": True}]}
THOUGHT = "the probe thinks"


def recognise(template: ChatTemplate, tokenizer: TextTokenizer) -> ToolFormat:
    """The format in which the template itself writes a tool call, read back by exactly that format's parser.

    Raises:
        ValueError: none or several; says which formats can be named instead.
    """
    written = _written_call(template, tokenizer)
    if not written:
        return "none"
    found = [form for form in TOOL_FORMATS if form != "none" and _reads_back(form, written)]
    if len(found) != 1:
        raise ValueError(
            f"environment.options.tool_format: the chat template writes a tool call as {written[:200]!r}, which "
            f"{'no' if not found else 'more than one'} known format reads back; name one of {', '.join(TOOL_FORMATS)}"
        )
    return found[0]


def _reads_back(form: ToolFormat, written: str) -> bool:
    parsed = parse_calls(form, written)
    return [(call.name, call.arguments) for call in parsed.calls] == [("probe", ARGUMENTS)]


def _written_call(template: ChatTemplate, tokenizer: TextTokenizer) -> str:
    """Return what the template makes of an answer that calls a tool; "" when it shows nothing of it."""
    chat = Chat(tokenizer, template, "none")
    messages = [_user(0), _calling(0)]
    try:
        opened = template.render(messages[:1], TOOLS, open_turn=True)
        whole = template.render(messages, TOOLS, open_turn=False)
    except RenderError:
        return ""
    body = whole.removeprefix(opened)
    ends = [body.find(tokenizer.name_of(number)) for number in chat.stop_ids]
    cut = min((at for at in ends if at >= 0), default=len(body))
    return body[:cut] if "quartz" in body else ""


def failures(chat: Chat) -> dict[Kind, str]:
    """The kinds of turns for which the template does not append, each with the reason."""
    kinds: dict[Kind, tuple[list[Message], Sequence[Tool]]] = {"user": (_talk(thinking=False), ())}
    if chat.knows_thinking:
        kinds["user after thinking"] = (_talk(thinking=True), ())
    tools = TOOLS if chat.shows_tools else ()
    if chat.tool_format != "none":
        kinds["tool"] = (_tool_loop(thinking=False), tools)
        kinds["tool after a bad call"] = ([_user(0), _saying(0), _result(0), _saying(1)], tools)
        if chat.knows_thinking:
            kinds["tool after thinking"] = (_tool_loop(thinking=True), tools)
    found: dict[Kind, str] = {}
    for kind, (messages, given) in kinds.items():
        reason = _failure(chat, messages, given)
        if not reason and kind == "user" and tools:
            reason = _failure(chat, messages, tools)
        if reason:
            found[kind] = reason
    return found


def _failure(chat: Chat, messages: list[Message], tools: Sequence[Tool]) -> str:
    """Why the template does not append over this conversation; "" when it does."""
    try:
        return _first_difference(chat, messages, tools)
    except RenderError as error:
        return str(error)


def _first_difference(chat: Chat, messages: list[Message], tools: Sequence[Tool]) -> str:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    text = chat.template.render(messages[: answers[0]], tools, open_turn=True)
    ids = chat.prompt(messages[: answers[0]], tools)
    for at, following in pairwise(answers):
        whole = chat.template.render(messages[: at + 1], tools, open_turn=False)
        if not whole.startswith(text):
            return "an answer is not rendered after what opened it"
        glue = chat.glue(messages[: at + 1], messages[at + 1 : following], tools)
        end = glue[: _end_length(chat, glue)]
        body, found, _ = whole[len(text) :].partition(end)
        if not found:
            return "an answer is not ended as the next turn says"
        if messages[at].get("reasoning_content") and THOUGHT not in body:
            return "it drops the thinking of the latest answer"
        text += body + glue
        ids += chat.tokenizer.encode(body) + chat.follow_up(
            messages[: at + 1], messages[at + 1 : following], tools, ended=False
        )
        rendered = chat.template.render(messages[:following], tools, open_turn=True)
        if rendered != text:
            return _describe(text, rendered)
        if chat.tokenizer.encode(rendered) != ids:
            return "the tokenizer makes other ids of the whole than of its turns"
    return ""


def _end_length(chat: Chat, glue: str) -> int:
    return max(
        len(name) for number in chat.stop_ids if glue.startswith(name := chat.tokenizer.name_of(number))
    )


def _describe(appended: str, rendered: str) -> str:
    if THOUGHT in appended and appended.count(THOUGHT) > rendered.count(THOUGHT):
        return "it drops the thinking of earlier answers"
    at = next(
        (at for at, (old, new) in enumerate(zip(appended, rendered, strict=False)) if old != new),
        min(len(appended), len(rendered)),
    )
    return (
        f"it rewrites earlier messages: {appended[at : at + 40]!r} becomes {rendered[at : at + 40]!r} "
        f"after {appended[max(0, at - 40) : at]!r}"
    )


def _talk(*, thinking: bool) -> list[Message]:
    return [_user(0), _saying(0, thinking), _user(1), _saying(1, thinking), _user(2), _saying(2, thinking)]


def _tool_loop(*, thinking: bool) -> list[Message]:
    calls = [entry for turn in range(2) for entry in (_calling(turn, thinking), _result(turn))]
    return [_user(0), *calls, _saying(2, thinking)]


def _user(turn: int) -> Message:
    return {"role": "user", "content": f"Question {turn}?"}


def _saying(turn: int, thinking: bool = False) -> Message:
    return {"role": "assistant", "content": f"Answer {turn}."} | _thought(thinking)


def _calling(turn: int, thinking: bool = False) -> Message:
    function = {"name": "probe", "arguments": ARGUMENTS}
    call = {"id": f"c{turn:05d}000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]} | _thought(thinking)


def _result(turn: int) -> Message:
    return {"role": "tool", "content": f"Result {turn}", "tool_call_id": f"c{turn:05d}000", "name": "probe"}


def _thought(thinking: bool) -> Message:
    return {"reasoning_content": THOUGHT} if thinking else {}
