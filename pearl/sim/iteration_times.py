"""Sums over an engine's iterations, each of which takes a little longer than the one before as contexts grow."""

import math

SAME_TIME_S = 1e-9
"""Times that differ by less are the same boundary: sums of floats in another order."""


def iterations_seconds(iterations: int, one: float, growth: float) -> float:
    """Return the seconds of ``iterations`` iterations: the first takes ``one``, each next one ``growth`` more."""
    return iterations * one + growth * (iterations * (iterations - 1) / 2)


def iterations_within(seconds: float, one: float, growth: float) -> int:
    """Return how many such iterations fit into ``seconds``."""
    if seconds < one - SAME_TIME_S:
        return 0
    half = one - growth / 2
    iterations = int(2 * seconds / (half + math.sqrt(half * half + 2 * growth * seconds)))
    while iterations_seconds(iterations + 1, one, growth) <= seconds + SAME_TIME_S:
        iterations += 1
    return iterations
