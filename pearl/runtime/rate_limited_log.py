"""Says a recurring thing once, then at most once in a while with how often it happened: logs stay bounded."""

import logging


class RateLimitedLogger:
    """One kind of line. Between two lines at least ``period_s`` passes; what was left out is counted in the next."""

    def __init__(self, log: logging.Logger, period_s: float = 60.0) -> None:
        self._log = log
        self._period_s = period_s
        self._said_at: float | None = None
        self._left_out = 0

    def warning(self, now: float, text: str, *values: object) -> None:
        if self._said_at is not None and now - self._said_at < self._period_s:
            self._left_out += 1
            return
        if self._left_out:
            text, values = text + " (and %d more like it before)", (*values, self._left_out)
        self._log.warning(text, *values)
        self._said_at, self._left_out = now, 0
