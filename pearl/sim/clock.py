"""Virtual time: a heap of (time, sequence, action). Equal times keep the order in which they were asked for."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._sequence = 0

    def at(self, time: float, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(time, self.now), self._sequence, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def next_time(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Advance to the next action and run it; there must be one."""
        self.now, _, action = heapq.heappop(self._heap)
        action()
