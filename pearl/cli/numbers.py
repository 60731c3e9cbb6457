"""Numbers on the command line: finite, and bounded both ways; anything else is a usage error that names the bounds."""

import argparse
import math
from collections.abc import Callable

MAX_GPUS = 1 << 16
MAX_GPUS_PER_NODE = 1024
MAX_WAIT_S = 86_400.0
_SHOWN_CHARS = 40


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        try:
            return whole_number(text, least, most)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def whole_number(text: str, least: int, most: int) -> int:
    """Return the number; ValueError when it is none or out of bounds."""
    try:
        value = int(text)  # also refuses what has more digits than Python converts
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise ValueError(f"{shown(text)}: give a whole number from {least} to {most}")
    return value


def number(least: float, most: float, what: str = "a number") -> Callable[[str], float]:
    """Return an argparse type for numbers from ``least`` to ``most``; ``what`` is how errors call them."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # NaN included
            raise argparse.ArgumentTypeError(f"{shown(text)}: give {what}, from {least:g} to {most:g}")
        return value

    return parse


def shown(text: str) -> str:
    """Return what was typed, cut when long."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text)} characters)"
