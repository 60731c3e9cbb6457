"""The nearest valid name for a mistyped one: spelling, hyphens, case, and words in another order."""

from collections.abc import Iterable
from difflib import SequenceMatcher

CUTOFF = 0.6
"""Below this a suggestion would mislead more often than help."""


def normal(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like ``name``, or None when none is like it."""
    scored = [(_similarity(normal(name), normal(choice)), choice) for choice in choices]
    score, choice = max(scored, default=(0.0, ""))
    return choice if score >= CUTOFF else None


def _similarity(name: str, choice: str) -> float:
    """1.0 = equal. A long word in common counts although the others differ (max_stalenes, staleness_bound)."""
    words = [word for word in name.split("_") if word]
    if not words:
        return 0.0
    others = choice.split("_")
    matched = sum(len(word) * max(_ratio(word, other) for other in others) for word in words)
    return max(_ratio(name, choice), matched / sum(map(len, words)) * 0.9)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()
