"""The run's status as JSON, however often it is asked for."""

from collections.abc import Callable

from pearl.runtime.clock import Clock

COST_FACTOR = 20.0
"""An answer is used again for this many times what it cost to make: asking takes at most a twentieth of the time."""


class StatusJson:
    def __init__(self, make: Callable[[], bytes], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._json = b""
        self._good_until_s = float("-inf")

    def json(self) -> bytes:
        """Return the status, of a moment ago when it was made then."""
        began_s = self._clock.now()
        if began_s >= self._good_until_s:
            self._json = self._make()
            now = self._clock.now()
            self._good_until_s = now + COST_FACTOR * (now - began_s)
        return self._json
