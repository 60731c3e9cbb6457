"""Bulk transfers that share a link's bandwidth equally, on the virtual clock.

One virtual clock of bytes a flow: it runs at the bandwidth over the number of flows, so that a flow's end on it is
known when the flow begins, and only the next end must be looked at.
"""

import heapq

from pearl.sim.clock import Action, VirtualClock


class SharedLink:
    def __init__(self, clock: VirtualClock, bytes_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._flows: dict[int, Action] = {}
        self._ends: list[tuple[float, int]] = []  # heap of (bytes a flow, flow); may hold ended ones
        self._moved = 0.0  # bytes a flow, at `_at`
        self._at = 0.0
        self._next = 0
        self._life = 0  # of the scheduled end; another is void

    def send(self, num_bytes: float, on_arrived: Action) -> int:
        """Begin a transfer; returns its number for ``cancel``."""
        self._catch_up()
        self._next += 1
        self._flows[self._next] = on_arrived
        heapq.heappush(self._ends, (self._moved + num_bytes, self._next))
        self._schedule()
        return self._next

    def cancel(self, flow: int) -> None:
        """Cancel a transfer; does nothing when it has arrived."""
        if flow in self._flows:
            self._catch_up()
            del self._flows[flow]
            self._schedule()

    def _catch_up(self) -> None:
        if self._flows:
            self._moved += (self._clock.now - self._at) * self._bytes_per_s / len(self._flows)
        self._at = self._clock.now

    def _schedule(self) -> None:
        self._life += 1
        while self._ends and self._ends[0][1] not in self._flows:
            heapq.heappop(self._ends)
        if self._ends:
            life = self._life
            seconds = max(0.0, self._ends[0][0] - self._moved) * len(self._flows) / self._bytes_per_s
            self._clock.after(seconds, lambda: self._arrived(life))

    def _arrived(self, life: int) -> None:
        if life != self._life:
            return
        self._catch_up()
        end, flow = heapq.heappop(self._ends)
        self._moved = end
        on_arrived = self._flows.pop(flow)
        self._schedule()
        on_arrived()
