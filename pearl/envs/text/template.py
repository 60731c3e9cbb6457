"""A tokenizer's own chat template, rendered as ``transformers`` renders it."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pearl.envs.text.messages import Message, Tool, for_template
from pearl.envs.text.tokenizer import read_object

SHIPPED = Path(__file__).parent / "templates"


class RenderError(ValueError):
    """The template refused these messages or failed on them."""


class ChatTemplate:
    def __init__(self, source: str, special: dict[str, str], variables: dict[str, Any] | None = None) -> None:
        """``special`` and ``variables`` are what the template can name besides messages and tools."""
        self.source = source
        self._variables = special | (variables or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, open_turn: bool) -> str:
        """The conversation as text; with ``open_turn`` up to where the assistant begins to speak.

        Raises:
            RenderError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[for_template(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=open_turn,
                **self._variables,
            )
        except Exception as error:  # a template is foreign code: it raises what its expressions raise
            raise RenderError(f"the chat template refuses the messages: {error}") from error


def read_template(directory: Path, name: str) -> str:
    """The source of the template called ``name``: "" is the model's own, others are shipped ones or files.

    Raises:
        ValueError: there is none; names what there is.
    """
    shipped = sorted(path.stem for path in SHIPPED.glob("*.jinja"))
    if name in shipped:
        return (SHIPPED / f"{name}.jinja").read_text(encoding="utf-8")
    if name:
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f'environment.options.template = "{name}": is neither a file that can be read ({error}) '
                f"nor shipped; shipped: {', '.join(shipped)}"
            ) from None
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = read_object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("tool_use", by_name.get("default"))
    if not isinstance(found, str):
        raise ValueError(
            f"{directory}: has no chat template; name one with environment.options.template: a file, or "
            f"shipped: {', '.join(shipped)}"
        )
    return found


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said; it changes no text."""

    tags = {"generation"}  # noqa: RUF012  # the library's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Without the escapes for HTML that jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)
