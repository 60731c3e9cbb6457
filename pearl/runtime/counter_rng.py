"""Random numbers without a state: each is a pure function of its keys, the same wherever and however often."""

import math

import numpy as np
import numpy.typing as npt

from pearl.types.splitmix import GOLDEN, MASK64, splitmix64


def bits(*keys: int) -> int:
    """64 bits, all of which depend on all keys and on their order."""
    value = 0
    for key in keys:
        value = splitmix64(value ^ (key & MASK64))
    return value


def uniform(*keys: int) -> float:
    """Draw a uniform in (0, 1)."""
    return ((bits(*keys) >> 11) + 0.5) * 2.0**-53


def normal(*keys: int) -> float:
    """Mean 0, standard deviation 1."""
    radius = math.sqrt(-2.0 * math.log(uniform(*keys, 0)))
    return radius * math.cos(2.0 * math.pi * uniform(*keys, 1))


def lognormal(mean: float, sigma: float, *keys: int) -> float:
    """Draw a lognormal with that mean; ``sigma`` is the standard deviation of its logarithm."""
    return mean * math.exp(sigma * normal(*keys) - sigma * sigma / 2.0)


def counter_bits(
    keys: npt.NDArray[np.uint64] | np.uint64, positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """64 bits for each (key, position): SplitMix64 from state ``key`` on; unsigned arithmetic wraps on purpose."""
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def counter_normals(key: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Mean 0, standard deviation 1, for each (key, position)."""
    even, odd = (counter_bits(np.uint64(bits(key, part)), positions) >> np.uint64(11) for part in (0, 1))
    scale = np.float64(2.0**-53)
    radius = np.sqrt(-2.0 * np.log((even + 0.5) * scale))
    normals: npt.NDArray[np.float64] = radius * np.cos((2.0 * np.pi) * (odd + 0.5) * scale)
    return normals
