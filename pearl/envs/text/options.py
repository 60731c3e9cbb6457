"""The part of ``environment.options`` that says how messages become ids, and the refusal of what does not append."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pearl.envs.text.chat import Chat
from pearl.envs.text.proof import Kind, failures, recognise
from pearl.envs.text.template import ChatTemplate, RenderError, read_template
from pearl.envs.text.tokenizer import load_tokenizer
from pearl.envs.text.tools import TOOL_FORMATS, ToolFormat

FollowUps = Literal["any", "tools", "none"]
Options = Mapping[str, int | float | str | bool]


class ChatOptions(msgspec.Struct, frozen=True):
    """Each is a key of ``environment.options``."""

    model: str = ""  # directory of tokenizer and template; "" = model.path
    template: str = ""  # a file, or a shipped one by its name; "" = the model's own
    tool_format: str = ""  # how the model writes tool calls; "" = recognised from the template
    follow_ups: FollowUps = "any"  # what may follow an answer: any message, tools' results, or nothing
    keep_thinking: bool = False  # in the context, even where the template drops it from earlier turns
    enable_thinking: bool | None = None  # given to the template, for those that have such a switch


def split_options(options: Options) -> tuple[ChatOptions, dict[str, int | float | str | bool]]:
    """The chat's own options, checked, and the rest.

    Raises:
        ValueError: one has a wrong type or value.
    """
    own = {key: value for key, value in options.items() if key in ChatOptions.__struct_fields__}
    rest = {key: value for key, value in options.items() if key not in own}
    try:
        chosen = msgspec.convert(own, ChatOptions)
    except msgspec.ValidationError as error:
        raise ValueError(f"environment.options: {error}") from None
    if chosen.tool_format and chosen.tool_format not in TOOL_FORMATS:
        raise ValueError(
            f'environment.options.tool_format = "{chosen.tool_format}": is not one of {", ".join(TOOL_FORMATS)}'
        )
    return chosen, rest


class ProvenChat(msgspec.Struct, frozen=True):
    """A chat with the kinds of turns that it must not be used for, and why."""

    chat: Chat
    refused: dict[Kind, str]

    def describe(self) -> str:
        """Say in one line what was proven of the template."""
        calls = self.chat.tool_format
        tools = "no tool calls" if calls == "none" else f"tool calls as {calls}"
        not_used = f"; refused: {', '.join(self.refused)}" if self.refused else ""
        return f"chat template only appends, {tools}{not_used}"


def make_chat(options: ChatOptions, model_path: str) -> ProvenChat:
    """Read tokenizer and template, find the tool format, and prove that the template appends.

    Raises:
        ValueError: something is missing, or the template rewrites what was said; names the option that helps.
    """
    directory = Path(options.model or model_path)
    key = "environment.options.model" if options.model else "model.path"
    if not directory.is_dir():
        raise ValueError(
            f'{key} = "{directory}": is no directory; text needs a model directory with its tokenizer '
            "(nothing is downloaded)"
        )
    tokenizer = load_tokenizer(directory)
    switch = {} if options.enable_thinking is None else {"enable_thinking": options.enable_thinking}
    template = ChatTemplate(read_template(directory, options.template), tokenizer.special, switch)
    try:
        form = _tool_format(options, template, recognised=recognise(template, tokenizer))
        chat = Chat(tokenizer, template, form)
    except RenderError as error:
        raise ValueError(f"{directory}: {error}") from error
    refused = failures(chat)
    if options.keep_thinking:
        refused = {kind: why for kind, why in refused.items() if "thinking" not in kind}
    _refuse(options.follow_ups, refused, form, str(directory))
    return ProvenChat(chat, refused)


def _tool_format(options: ChatOptions, template: ChatTemplate, recognised: ToolFormat) -> ToolFormat:
    named = next((form for form in TOOL_FORMATS if form == options.tool_format), None)
    if named is None or named in ("none", recognised):
        return named or recognised
    raise ValueError(
        f'environment.options.tool_format = "{named}": the chat template writes '
        f"{'no tool calls' if recognised == 'none' else recognised}; "
        'a template that writes them is shipped: environment.options.template = "chatml-tools" (hermes)'
    )


_NEEDED: dict[FollowUps, tuple[Kind, ...]] = {
    "any": ("tool", "user", "tool after thinking", "user after thinking"),
    "tools": ("tool", "tool after thinking"),
    "none": (),
}
assert set(_NEEDED) == set(get_args(FollowUps))


def _refuse(follow_ups: FollowUps, refused: dict[Kind, str], form: ToolFormat, where: str) -> None:
    wrong = [kind for kind in _NEEDED[follow_ups] if kind in refused]
    if not wrong:
        return
    ways = []
    if follow_ups == "any" and form != "none" and not any(kind in refused for kind in _NEEDED["tools"]):
        ways.append('environment.options.follow_ups = "tools" (only tools\' results follow an answer)')
    if all("thinking" in kind for kind in wrong):
        ways.append("environment.options.keep_thinking = true (earlier thinking stays in the context)")
    ways.append('environment.options.template = "chatml-tools" or a file of yours that only appends')
    reasons = "; ".join(f"{kind}: {refused[kind]}" for kind in wrong)
    raise ValueError(f"{where}: the chat template does not only append ({reasons}). Set {', or '.join(ways)}")
