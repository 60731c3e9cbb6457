"""How long iterations take: A + b * decoding + t_prefill * prefilled tokens, times the noise of the iteration."""

import numpy as np

from pearl.runtime.counter_rng import bits, counter_normals
from pearl.workers.rollout.emulated.settings import EmulatedSettings

_BLOCK = 1024
"""Noise is drawn for so many iterations at once."""


class Timing:
    def __init__(self, settings: EmulatedSettings) -> None:
        self._config = settings.timing
        self._key = bits(settings.seed, settings.slot)
        self._noise: list[float] = []
        self._first = 0  # iteration of the first in ``_noise``

    def seconds(self, iteration: int, num_decoding: int, prefill_tokens: int) -> float:
        config = self._config
        seconds = config.decode_fixed_seconds + config.decode_seconds_per_seq * num_decoding
        seconds += config.prefill_seconds_per_token * prefill_tokens
        return seconds * self._factor(iteration)

    def _factor(self, iteration: int) -> float:
        """Lognormal with mean 1."""
        place = iteration - self._first
        if not 0 <= place < len(self._noise):
            self._first = iteration // _BLOCK * _BLOCK
            sigma = self._config.noise
            normals = counter_normals(self._key, np.arange(self._first, self._first + _BLOCK))
            self._noise = np.exp(sigma * normals - sigma * sigma / 2.0).tolist()
            place = iteration - self._first
        return self._noise[place]
