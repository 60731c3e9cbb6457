"""Texts of errors as they may leave the process: never raising, printable, valid UTF-8, bounded.

What foreign code raises may have a text with lone surrogates or NULs, one of many megabytes, or one that raises
itself when it is asked for. What goes wrong must be reported all the same.
"""

from typing import Any

import msgspec

MAX_CHARS = 2000
_KEPT = "\n\t"


def error_text(error: BaseException, max_chars: int = MAX_CHARS) -> str:
    """Return the error's own text, or a remark in its place when it has none that can be had."""
    try:
        text = str(error)
    except RecursionError:
        text = "<its text cannot be had: RecursionError>"
    except BaseException as failure:  # noqa: BLE001 - foreign code, whose error is being reported already
        text = f"<its text cannot be had: {type(failure).__name__}>"
    return escaped(text, max_chars)


def escaped(text: str, max_chars: int = MAX_CHARS) -> str:
    r"""Cut the text and write what cannot be printed, sent or stored as an escape, e.g. ``\ud800``."""
    cut = text[:max_chars]
    if not cut.isprintable():
        cut = "".join(
            letter if letter.isprintable() or letter in _KEPT else _escape(letter) for letter in cut
        )
    return cut[:max_chars]


def without_surrogates(value: Any) -> Any:
    """Return a copy of a message or of plain data in which every text is valid UTF-8; lone surrogates are escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, msgspec.Struct):
        changed = {name: without_surrogates(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **changed)
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:  # named
        return type(value)(*map(without_surrogates, value))
    if isinstance(value, list | tuple):
        return type(value)(map(without_surrogates, value))
    return value


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
