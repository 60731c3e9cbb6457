"""Sums over an engine's iterations, as a real engine reports them to the runtime tracker."""

from pearl.types.profile import IterationSums


class IterationTally:
    """Adds up stretches of like iterations; ``take`` gives the sums since the last call."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self.seconds = self.decoding = self.prefill = 0.0
        self.decoding2 = self.prefill2 = self.decoding_prefill = 0.0
        self.seconds_decoding = self.seconds_prefill = self.seconds2 = 0.0
        self.context = self.context2 = self.seconds_context = 0.0
        self.decoding_context = self.prefill_context = 0.0

    def add(self, iterations: int, seconds: float, decoding: int, prefill: int, context: int) -> None:
        """Add ``iterations`` iterations that took ``seconds`` together, with ``prefill`` tokens in one of them.

        ``context`` is that of all decoding sequences at the first iteration; each grows by a token an iteration. The
        sums are as if all iterations had the context of the middle one.
        """
        middle = context + decoding * (iterations - 1) / 2
        self.count += iterations
        self.seconds += seconds
        self.decoding += iterations * decoding
        self.decoding2 += iterations * decoding * decoding
        self.seconds_decoding += seconds * decoding
        self.seconds2 += seconds * seconds / iterations
        self.context += iterations * middle
        self.context2 += iterations * middle * middle
        self.decoding_context += iterations * decoding * middle
        self.seconds_context += seconds * middle
        if prefill:
            self.prefill += prefill
            self.prefill2 += prefill * prefill
            self.decoding_prefill += decoding * prefill
            self.seconds_prefill += seconds * prefill
            self.prefill_context += prefill * middle

    def take(self) -> IterationSums:
        sums = IterationSums(
            self.count,
            self.seconds,
            self.decoding,
            self.prefill,
            self.decoding2,
            self.prefill2,
            self.decoding_prefill,
            self.seconds_decoding,
            self.seconds_prefill,
            self.seconds2,
            self.context,
            self.context2,
            self.decoding_context,
            self.prefill_context,
            self.seconds_context,
        )
        self._clear()
        return sums
