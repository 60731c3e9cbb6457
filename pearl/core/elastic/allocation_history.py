"""Who served how long in the step under way: what its time is held against, and how often training GPUs are lent."""

from collections.abc import Sequence

import msgspec

from pearl.core.elastic.gate import ema
from pearl.types.ids import Slot
from pearl.types.plan import Allocation, Role
from pearl.types.worker_table import WorkerRow

UNKNOWN_SHARE = 0.5
"""Of the time that training GPUs are lent, before a step has told."""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    allocation: Allocation  # as the plan wants it
    is_lent: bool  # workers on training GPUs are among them
    seconds: float


class HistoryState(msgspec.Struct):
    held: tuple[tuple[Slot, Role], ...] = ()  # roles of the active workers
    held_since_s: float = 0.0
    allocation: Allocation = Allocation()
    is_lent: bool = False
    counted_until_s: float = 0.0
    stretches: list[Interval] = msgspec.field(default_factory=list)  # of this step
    lent_share: float | None = None  # moving average


class AllocationHistory:
    def __init__(self, state: HistoryState, smoothing: float) -> None:
        self._state = state
        self._smoothing = smoothing

    @property
    def lent_share(self) -> float:
        """Return the share of the time in which borrowed workers serve."""
        share = self._state.lent_share
        return UNKNOWN_SHARE if share is None else share

    def is_steady_since(self, time_s: float) -> bool:
        """Whether nobody has come, left or changed its role since."""
        return self._state.held_since_s <= time_s

    def note(self, rows: Sequence[WorkerRow], allocation: Allocation, now: float) -> None:
        """These are active now."""
        state = self._state
        held = tuple((row.slot, row.role) for row in rows)
        is_lent = any(row.zone == "overlap" for row in rows)
        if held != state.held:
            state.held, state.held_since_s = held, now
        if (allocation, is_lent) != (state.allocation, state.is_lent):
            self._count(now)
            state.allocation, state.is_lent = allocation, is_lent

    def close_step(self, now: float) -> list[Interval]:
        """The stretches of the step that is over; the next one begins."""
        self._count(now)
        state = self._state
        stretches, state.stretches = state.stretches, []
        total_s = sum(stretch.seconds for stretch in stretches)
        if total_s > 0:
            lent_s = sum(stretch.seconds for stretch in stretches if stretch.is_lent)
            state.lent_share = ema(state.lent_share, lent_s / total_s, self._smoothing)
        return stretches

    def _count(self, now: float) -> None:
        state = self._state
        if now > state.counted_until_s:
            state.stretches.append(Interval(state.allocation, state.is_lent, now - state.counted_until_s))
        state.counted_until_s = now
