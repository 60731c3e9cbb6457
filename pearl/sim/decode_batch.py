"""The sequences that decode together on one worker, counted in iterations: each makes one token an iteration."""

import heapq

from pearl.sim.requests import Sequence
from pearl.types.ids import AttemptId


class DecodeBatch:
    """The sequences that decode now. ``context`` is the sum of their tokens at boundary number ``iterations``."""

    __slots__ = ("_ends", "context", "iterations", "sequences")

    def __init__(self) -> None:
        self.iterations = 0
        self.context = 0
        self.sequences: dict[AttemptId, Sequence] = {}  # in the order in which they joined
        self._ends: list[
            tuple[int, AttemptId]
        ] = []  # heap of (boundary, attempt); may hold some that are void

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence whose first token, or next one after a retraction, comes at this boundary."""
        request = sequence.request
        sequence.made += 1
        sequence.joined = self.iterations
        sequence.end = self.iterations + request.make_tokens - sequence.made
        self.sequences[request.attempt] = sequence
        self.context += sequence.context
        heapq.heappush(self._ends, (sequence.end, request.attempt))

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence; ``made`` then counts all its tokens."""
        sequence.made = self.made(sequence)
        del self.sequences[sequence.request.attempt]
        self.context -= sequence.context

    def made(self, sequence: Sequence) -> int:
        if sequence.request.attempt in self.sequences:
            return sequence.made + self.iterations - sequence.joined
        return sequence.made

    def advance(self, iterations: int) -> None:
        self.iterations += iterations
        self.context += iterations * len(self.sequences)

    def next_end(self) -> int | None:
        """Return the boundary at which the next sequence has its last token; it is due when that is at or before
        ``iterations``."""
        ends, sequences = self._ends, self.sequences
        while ends:
            end, attempt = ends[0]
            sequence = sequences.get(attempt)
            if sequence is not None and sequence.end == end:
                return end
            heapq.heappop(ends)
        return None

    def due(self) -> list[Sequence]:
        """Return the sequences that have their last token by now."""
        ends, sequences = self._ends, self.sequences
        found: list[Sequence] = []
        while ends and ends[0][0] <= self.iterations:
            end, attempt = heapq.heappop(ends)
            sequence = sequences.get(attempt)
            if sequence is not None and sequence.end == end:
                found.append(sequence)
        return found

    def clear(self) -> None:
        self.sequences.clear()
        self._ends.clear()
        self.context = 0
