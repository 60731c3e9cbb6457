"""Turns messages into ids and generated ids into messages, for one tokenizer, template and tool format.

The ids of a conversation are append-only: the first prompt is rendered whole, and each observation is the template's
text from the end of the assistant's turn on. What was generated in between is never made again from text.
"""

import json
from collections.abc import Sequence

import msgspec

from pearl.envs.text.messages import Message, MessageError, Tool, clean
from pearl.envs.text.template import ChatTemplate, RenderError
from pearl.envs.text.tokenizer import TextTokenizer
from pearl.envs.text.tools import ToolFormat, parse_calls, write_calls

MARK = "PearlMark"
"""Stands for what the assistant said where only the text around it is wanted."""
THINKING_END = "</think>"
MAX_CALLS_IN_A_TURN = 1000


class Answer(msgspec.Struct, frozen=True):
    message: Message
    failure: str  # why a tool call in it could not be read; "" = nothing failed
    has_thinking: bool


class Chat:
    """``end_id`` is the token with which the template ends an assistant's turn."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, tool_format: ToolFormat) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.tool_format: ToolFormat = tool_format
        self.end_id = self._find_end()
        self.stop_ids = tuple(dict.fromkeys((self.end_id, *tokenizer.eos_ids)))
        self._ends = [tokenizer.name_of(number) for number in self.stop_ids]
        self.knows_thinking = THINKING_END in template.source
        self.shows_tools = self._find_tools()

    # messages to ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        if tools and not self.shows_tools:
            raise MessageError(
                "tools: the model's chat template does not show any to the model; "
                'environment.options.template = "chatml-tools" does'
            )
        return self.tokenizer.encode(self.template.render(messages, tools, open_turn=True))

    def follow_up(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], *, ended: bool
    ) -> list[int]:
        """The ids between an answer, the last of ``messages``, and the next one. ``ended``: the answer's own ids
        have the end token already."""
        ids = self.tokenizer.encode(self.glue(messages, new, tools))
        if not ids or ids[0] not in self.stop_ids:
            raise RenderError("the tokenizer does not keep the end of a turn apart from what follows")
        return ids[1:] if ended else ids

    def glue(self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The template's text from the end token of an answer, the last of ``messages``, to the next answer."""
        text = self.template.render(
            [*_opening(messages[:-1]), _marked(messages[-1]), *new], tools, open_turn=True
        )
        _, found, rest = text.rpartition(MARK)
        starts = [at for end in self._ends if (at := rest.find(end)) >= 0] if found else []
        if not starts:
            raise RenderError("the chat template does not show the end of an assistant's turn")
        return rest[min(starts) :]

    def say(self, answer: str | Message) -> list[int]:
        """The ids of an answer that nobody generated, with its end: a reference solution's."""
        if isinstance(answer, str):
            text = answer
        else:
            written = write_calls(self.tool_format, answer.get("tool_calls", ()))
            text = "".join((answer.get("content") or "", written))
        return [*self.tokenizer.encode(text), self.end_id]

    # ids to messages

    def text_of(self, action: Sequence[int]) -> str:
        """Without the end token."""
        body = action[:-1] if action and action[-1] in self.stop_ids else action
        return self.tokenizer.decode(body)

    def read(self, text: str, turn: int) -> Answer:
        """The assistant's message that ``text`` is, with its tool calls and thinking apart."""
        thinking, content = self._split_thinking(text)
        parsed = parse_calls(self.tool_format, content)
        message: Message = {"role": "assistant", "content": clean(parsed.content)}
        if thinking:
            message["reasoning_content"] = clean(thinking)
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": f"c{turn:05d}{index:03d}",  # nine letters and digits: what Mistral's template asks for
                    "type": "function",
                    "function": {
                        "name": clean(call.name),
                        "arguments": clean(json.dumps(call.arguments, ensure_ascii=False)),
                    },
                }
                for index, call in enumerate(parsed.calls[:MAX_CALLS_IN_A_TURN])
            ]
        return Answer(message, parsed.failure, bool(thinking))

    def _split_thinking(self, text: str) -> tuple[str, str]:
        if not self.knows_thinking or THINKING_END not in text:
            return "", text
        thinking, _, content = text.partition(THINKING_END)
        return thinking.strip().removeprefix("<think>").strip(), content.lstrip("\n")

    def _find_tools(self) -> bool:
        """Whether the template tells the model of its tools."""
        tool = {"type": "function", "function": {"name": MARK, "parameters": {"type": "object"}}}
        try:
            said = self.template.render([{"role": "user", "content": "Hello"}], [tool], open_turn=True)
        except RenderError:
            return False
        return MARK in said

    def _find_end(self) -> int:
        """ValueError when the template does not end a turn with a special token: nothing would stop an answer."""
        said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": MARK}]
        rest = self.template.render(said, (), open_turn=False).rpartition(MARK)[2]
        ids = self.tokenizer.encode(rest)
        if not ids or ids[0] not in self.tokenizer.special_ids:
            raise ValueError(
                "the chat template does not end an assistant's turn with a special token of the tokenizer "
                f"(it ends with {rest[:40]!r})"
            )
        return ids[0]


def _opening(messages: Sequence[Message]) -> list[Message]:
    """Return the text up to the first user's message: what follows an answer depends on no more of what was before
    it."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return list(messages[: index + 1])
    return list(messages)


def _marked(message: Message) -> Message:
    """The same kind of answer, with the mark as its last words."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": MARK}
    emptied = [call | {"function": {"name": MARK, "arguments": "{}"}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": emptied}
