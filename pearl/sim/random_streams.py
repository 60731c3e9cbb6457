"""Named random streams: what one part draws never shifts what another draws, so policies are compared in pairs."""

import math
import random


def stream(seed: int, *name: str | int) -> random.Random:
    """Return the random stream of that name; the same for the same seed on every machine."""
    return random.Random("/".join(map(str, (seed, *name))))


def lognormal_mean_one(rng: random.Random, sigma: float) -> float:
    """Draw a positive factor with mean 1."""
    return math.exp(rng.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0
