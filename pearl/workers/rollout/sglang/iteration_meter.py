"""Engine iterations as they show in what SGLang streams: each gives every running request at most one token.

SGLang tells no times of single iterations. The estimate is right while it decodes, which is nearly always; an iteration
that only prefills shows as the wait for its first tokens. Pure: times come in.
"""

from collections import deque

from pearl.types.messages.rollout import IterationStat

MAX_STATS = 4096
"""Iterations remembered between two calls of ``take``."""


class IterationMeter:
    def __init__(self) -> None:
        self._stats: deque[IterationStat] = deque(maxlen=MAX_STATS)
        self._since_s: float | None = None  # when the iteration that is being seen began; None = nothing ran
        self._last_s = 0.0
        self._seen: dict[int, int] = {}  # attempts with tokens of this iteration, and how many
        self._prefill_tokens = 0
        self._context_tokens = 0

    def begin(self, now: float) -> None:
        """A request was handed over; if nothing ran before, an iteration begins now."""
        if self._since_s is None:
            self._since_s = now

    def note(
        self, attempt: int, now: float, num_tokens: int, prefilled_tokens: int, context_tokens: int
    ) -> None:
        """Tokens of one attempt came."""
        if attempt in self._seen:
            self._close(self._last_s)
        if self._since_s is None:
            self._since_s = now
        self._last_s = now
        self._seen[attempt] = max(1, num_tokens)
        self._prefill_tokens += prefilled_tokens
        self._context_tokens += context_tokens

    def idle(self) -> None:
        """Note that nothing runs any more."""
        if self._seen:
            self._close(self._last_s)
        self._since_s = None

    def take(self) -> list[IterationStat]:
        """Return and clear the finished iterations, the newest 4096 at most."""
        found = list(self._stats)
        self._stats.clear()
        return found

    def _close(self, now: float) -> None:
        assert self._since_s is not None
        # Tokens that come several at once are as many iterations.
        count = max(self._seen.values())
        seconds = max(0.0, now - self._since_s) / count
        for index in range(count):
            prefill = self._prefill_tokens if index == 0 else 0
            self._stats.append(IterationStat(seconds, len(self._seen), prefill, self._context_tokens))
        self._since_s = now
        self._seen.clear()
        self._prefill_tokens = self._context_tokens = 0
