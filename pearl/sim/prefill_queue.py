"""What one worker has yet to prefill: sequences that wait for memory, and admitted ones that are computed in chunks."""

from collections import deque

from pearl.sim.hardware import WorkerSpeed
from pearl.sim.requests import Sequence
from pearl.types.ids import AttemptId


class PrefillQueue:
    """The queue. ``context`` is the sum over admitted sequences, ``chunk`` what the running iteration prefills of
    whom."""

    __slots__ = ("_speed", "admitted", "chunk", "chunk_seconds", "context", "waiting")

    def __init__(self, speed: WorkerSpeed) -> None:
        self._speed = speed
        self.waiting: deque[Sequence] = deque()
        self.admitted: deque[Sequence] = deque()
        self.context = 0
        self.chunk: list[tuple[Sequence, int]] = []
        self.chunk_seconds = 0.0

    def admit(self, sequence: Sequence) -> None:
        self.context += sequence.context
        self.admitted.append(sequence)

    def leave(self) -> Sequence:
        """Remove the first admitted sequence, which is wholly prefilled."""
        sequence = self.admitted.popleft()
        self.context -= sequence.context
        return sequence

    def fill_chunk(self) -> None:
        """Fill up to a chunk with tokens to be prefilled, in the order of arrival."""
        speed, room, seconds = self._speed, self._speed.prefill_chunk_tokens, 0.0
        for sequence in self.admitted:
            tokens = min(room, sequence.to_prefill)
            done = sequence.context - sequence.to_prefill
            middle = done + (tokens - 1) / 2
            seconds += tokens * (
                speed.prefill_seconds_per_token + speed.prefill_seconds_per_context_token * middle
            )
            self.chunk.append((sequence, tokens))
            room -= tokens
            if room == 0:
                break
        self.chunk_seconds = seconds

    def end_chunk(self) -> int:
        """Finish the chunk and return its tokens; sequences that are whole stay first in ``admitted``."""
        total = 0
        for sequence, tokens in self.chunk:
            sequence.prefilled += tokens
            sequence.to_prefill -= tokens
            total += tokens
        self.chunk = []
        return total

    def find(self, attempt: AttemptId) -> Sequence | None:
        for queue in (self.admitted, self.waiting):
            for sequence in queue:
                if sequence.request.attempt == attempt:
                    return sequence
        return None

    def take_out(self, sequence: Sequence) -> bool:
        """Remove a sequence and return whether it was admitted. An iteration that computes it continues without
        it, for no less time."""
        if sequence not in self.admitted:
            self.waiting.remove(sequence)
            return False
        self.admitted.remove(sequence)
        self.context -= sequence.context
        self.chunk = [(other, tokens) for other, tokens in self.chunk if other is not sequence]
        if not self.chunk:
            self.chunk_seconds = 0.0
        return True

    def clear(self) -> None:
        self.waiting.clear()
        self.admitted.clear()
        self.context = 0
        self.chunk = []
        self.chunk_seconds = 0.0
