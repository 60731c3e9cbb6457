"""What the agent can say in one turn: exactly one tool with its arguments, then the end token."""

from collections.abc import Sequence
from typing import NamedTuple

from pearl.envs.bugfix import tokenizer as words
from pearl.envs.bugfix.task import Shape


class Test(NamedTuple):
    """Which line fails?"""


class View(NamedTuple):
    """What does this line need?"""

    line: int


class Edit(NamedTuple):
    line: int
    symbol: int


class Submit(NamedTuple):
    """Finish; rewarded when the program is right."""


Action = Test | View | Edit | Submit


def parse(ids: Sequence[int], shape: Shape) -> Action | None:
    """The action, or None for anything else: a missing end, a word too many, a line that the program lacks."""
    match list(ids):
        case [words.TEST, words.END]:
            return Test()
        case [words.SUBMIT, words.END]:
            return Submit()
        case [words.VIEW, where, words.END]:
            line = _below(words.line_of(where), shape.num_lines)
            return None if line is None else View(line)
        case [words.EDIT, where, what, words.END]:
            line = _below(words.line_of(where), shape.num_lines)
            symbol = _below(words.symbol_of(what), shape.num_symbols)
            return None if line is None or symbol is None else Edit(line, symbol)
    return None


def render(action: Action) -> list[int]:
    """The ids that ``parse`` reads back."""
    match action:
        case Test():
            return [words.TEST, words.END]
        case Submit():
            return [words.SUBMIT, words.END]
        case View(line):
            return [words.VIEW, words.FIRST_LINE + line, words.END]
        case Edit(line, symbol):
            return [words.EDIT, words.FIRST_LINE + line, words.FIRST_SYMBOL + symbol, words.END]


def _below(value: int | None, bound: int) -> int | None:
    return value if value is not None and value < bound else None
