"""The environment's own words, one id each. Nothing is ever merged, so ids and text determine each other."""

from collections.abc import Iterable, Sequence

MAX_LINES = 6
MAX_SYMBOLS = 11

_FRAME = ("<pad>", "<end>", "<task>", "<agent>", "<tool>", "<cut>")
_TOOLS = ("TEST", "VIEW", "EDIT", "SUBMIT")
_RESULTS = ("pass", "fail", "needs", "done", "error")
_LINES = tuple(f"L{line}" for line in range(1, MAX_LINES + 1))
_SYMBOLS = tuple("abcdefghijk")
WORDS = _FRAME + _TOOLS + _RESULTS + _LINES + _SYMBOLS

PAD, END, TASK, AGENT, TOOL, CUT = range(6)
TEST, VIEW, EDIT, SUBMIT = range(6, 10)
PASS, FAIL, NEEDS, DONE, ERROR = range(10, 15)
FIRST_LINE = 15
FIRST_SYMBOL = FIRST_LINE + MAX_LINES

_IDS = {word: number for number, word in enumerate(WORDS)}


def decode(ids: Iterable[int]) -> str:
    """Readable text, one word an id. ValueError for an id that is no word."""
    return " ".join(_word(number) for number in ids)


def encode(text: str) -> list[int]:
    """The ids of whitespace-separated words. ValueError for a word that is not in the vocabulary."""
    unknown = sorted({word for word in text.split() if word not in _IDS})
    if unknown:
        raise ValueError(f"{unknown} are no words of this environment; it knows {' '.join(WORDS)}")
    return [_IDS[word] for word in text.split()]


def line_of(token: int) -> int | None:
    """The line (from 0) that a token names, or None."""
    return token - FIRST_LINE if FIRST_LINE <= token < FIRST_SYMBOL else None


def symbol_of(token: int) -> int | None:
    """The symbol (from 0) that a token names, or None."""
    return token - FIRST_SYMBOL if FIRST_SYMBOL <= token < len(WORDS) else None


def symbols(values: Sequence[int]) -> list[int]:
    return [FIRST_SYMBOL + value for value in values]


def _word(number: int) -> str:
    if not 0 <= number < len(WORDS):
        raise ValueError(f"id {number} is outside the vocabulary of {len(WORDS)} words")
    return WORDS[number]
