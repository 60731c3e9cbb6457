"""Sums over an engine's passes, each of which takes a little longer than the one before as contexts grow."""

import math

SAME_TIME_S = 1e-9
"""Times that differ by less are the same boundary: sums of floats in another order."""


def many_passes(passes: int, one: float, growth: float) -> float:
    """Seconds of ``passes`` passes, the first of ``one`` second and each ``growth`` longer than the one before."""
    return passes * one + growth * (passes * (passes - 1) / 2)


def whole_passes(seconds: float, one: float, growth: float) -> int:
    """How many such passes fit into ``seconds``."""
    if seconds < one - SAME_TIME_S:
        return 0
    half = one - growth / 2
    passes = int(2 * seconds / (half + math.sqrt(half * half + 2 * growth * seconds)))
    while many_passes(passes + 1, one, growth) <= seconds + SAME_TIME_S:
        passes += 1
    return passes
