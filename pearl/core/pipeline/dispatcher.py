"""Hands ready trajectories to workers: oldest cohort first, each to where the router wants it.

A worker may take a trajectory when it is active, has room, serves a version of the living lineage that is recent
enough for the trajectory's cohort, and is not older than what the trajectory has already been made with.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pearl.core.pipeline.evaluation import EvaluationRound
from pearl.core.pipeline.router import (
    PREFILL_STRATEGIES,
    STRATEGIES,
    Candidate,
    DecodeCandidate,
    Strategy,
    choose_decode,
)
from pearl.core.pipeline.trajectory import Trajectory
from pearl.types.command_buffer import CommandBuffer
from pearl.types.commands import Generate
from pearl.types.config import RolloutConfig
from pearl.types.ids import AttemptId, Incarnation, Slot, TrajectoryId
from pearl.types.lineage import Lineages
from pearl.types.weights import Version
from pearl.types.worker_table import WorkerRow, WorkerTable


class Route(NamedTuple):
    """A worker that does all, or one that decodes and another that prefills for it."""

    row: WorkerRow
    prefill: WorkerRow | None = None


class UpdateQuota(NamedTuple):
    """Requests that a worker may have while others take new weights: all that wait would go to the first to be done
    with it, and the others would find nothing."""

    prefill: int
    others: int

    def has_room(self, row: WorkerRow, trajectory: Trajectory) -> bool:
        share = self.prefill if row.role == "prefill" else self.others
        return row.running < share or row.slot == trajectory.home


class DispatchState(msgspec.Struct):
    ready: list[tuple[int, TrajectoryId]] = msgspec.field(
        default_factory=list
    )  # heap of (cohort, trajectory)
    attempts: dict[AttemptId, TrajectoryId] = msgspec.field(default_factory=dict)
    deadlines: list[tuple[float, AttemptId]] = msgspec.field(
        default_factory=list
    )  # heap; ended attempts stay in


class Dispatcher:
    def __init__(
        self,
        state: DispatchState,
        config: RolloutConfig,
        table: WorkerTable,
        lineages: Lineages,
        commands_out: CommandBuffer,
        router: Strategy | None = None,
    ) -> None:
        """``router`` takes the place of the built-in one that the settings name."""
        self.state = state
        self._config = config
        self._table = table
        self._lineages = lineages
        self._commands = commands_out
        self._choose = router or STRATEGIES[config.router]
        self._choose_prefill = router or PREFILL_STRATEGIES[config.router]

    def push(self, trajectory: Trajectory, now: float) -> None:
        trajectory.enter("ready")
        trajectory.since_s = now
        heapq.heappush(self.state.ready, (trajectory.cohort, trajectory.id))

    def allowance(self, trajectory: Trajectory) -> int:
        """Tokens the current turn may still generate; 0 or less when its limit or the context is used up."""
        turn = self._config.max_new_tokens_per_turn - trajectory.turns[-1].generated_tokens
        return min(turn, self._config.max_context_tokens - trajectory.tokens)

    def dispatch(
        self, trajectories: dict[TrajectoryId, Trajectory], evaluation: EvaluationRound | None, now: float
    ) -> None:
        ready = self.state.ready
        if not ready:
            return
        rows = [row for row in self._table.serving() if row.running < self._config.max_requests_per_worker]
        shares = self._shares()
        waiting: list[tuple[int, TrajectoryId]] = []
        while rows and ready:
            entry = heapq.heappop(ready)
            trajectory = trajectories.get(entry[1])
            if trajectory is None or trajectory.phase != "ready":
                continue
            there = rows if shares is None else [r for r in rows if shares.has_room(r, trajectory)]
            route = self._route(trajectory, there, evaluation)
            if route is None:
                waiting.append(entry)
                continue
            self._send(trajectory, route, now)
            rows = [row for row in rows if row.running < self._config.max_requests_per_worker]
        for entry in waiting:
            heapq.heappush(ready, entry)

    def _shares(self) -> "UpdateQuota | None":
        """None while nobody is about to come back: then those that serve are all there is."""
        back = [
            row for row in self._table.rows.values() if row.status == "updating" and row.version is not None
        ]
        if not back:
            return None
        there = self._table.serving() + back
        prefill = [row for row in there if row.role == "prefill"]
        others = [row for row in there if row.role != "prefill"]
        return UpdateQuota(self._share(prefill), self._share(others))

    def _share(self, rows: list[WorkerRow]) -> int:
        total = len(self.state.ready) + sum(row.running for row in rows)
        return -(-total // max(1, len(rows)))

    def _route(
        self, trajectory: Trajectory, rows: list[WorkerRow], evaluation: EvaluationRound | None
    ) -> Route | None:
        able = self._able(trajectory, rows, evaluation)
        whole_rows = [row for row in able if row.role == "colocated"]
        if len(whole_rows) < len(able):
            decoders = [row for row in able if row.role == "decode"]
            if decoders and (pair := self._route_pair(trajectory, able, decoders)):
                return pair
        whole = self._nearest(trajectory, whole_rows, self._choose)
        return None if whole is None else Route(whole)

    def _route_pair(
        self, trajectory: Trajectory, able: list[WorkerRow], decoders: list[WorkerRow]
    ) -> Route | None:
        """Prefill by prefix and queue, decode by load and room; both serve the same version."""
        served = _distinct(row.version for row in decoders)
        prefillers = [row for row in able if row.role == "prefill" and row.version in served]
        prefill = self._nearest(trajectory, prefillers, self._choose_prefill)
        if prefill is None:
            return None
        capacity = self._config.kv_capacity_tokens
        candidates = [
            DecodeCandidate(row.slot, row.running, capacity - row.reserved_tokens)
            for row in decoders
            if row.version == prefill.version
        ]
        slot = choose_decode(trajectory.tokens + self.allowance(trajectory), candidates)
        assert slot is not None
        return Route(self._table.rows[slot], prefill)

    def _nearest(self, trajectory: Trajectory, rows: list[WorkerRow], choose: Strategy) -> WorkerRow | None:
        home = trajectory.home
        candidates = [
            Candidate(row.slot, row.running, self._cached(trajectory, row) if row.slot == home else 0)
            for row in rows
        ]
        slot = choose(trajectory.tokens, self._home(trajectory, rows), candidates)
        return None if slot is None else self._table.rows[slot]

    def _able(
        self, trajectory: Trajectory, rows: list[WorkerRow], evaluation: EvaluationRound | None
    ) -> list[WorkerRow]:
        """Return the workers that serve a version the trajectory may use. Nearly always all serve the same one, so
        it is checked once."""
        able: list[WorkerRow] = []
        judged: Version | None = None
        may_use = False
        for row in rows:
            version = row.version
            assert version is not None, row
            if version != judged:
                judged, may_use = version, self._may_use(trajectory, version, evaluation)
            if may_use:
                able.append(row)
        return able

    def _may_use(self, trajectory: Trajectory, version: Version, evaluation: EvaluationRound | None) -> bool:
        if not self._lineages.holds(version):
            return False
        if trajectory.evaluation is not None:
            return evaluation is not None and version.step == evaluation.step
        if trajectory.end_version is not None and version < trajectory.end_version:
            return False
        return version.step >= trajectory.cohort - self._config.staleness_bound

    def _home(self, trajectory: Trajectory, rows: list[WorkerRow]) -> Slot | None:
        """Return the worker that holds the trajectory's prefix, while it is worth waiting for and does the work of
        ``rows``."""
        if trajectory.home is None or not rows:
            return None
        row = self._table.current(trajectory.home, trajectory.prefix_incarnation)
        is_there = row is not None and row.status in ("serving", "updating", "verified")
        return row.slot if row is not None and is_there and row.role == rows[0].role else None

    @staticmethod
    def _cached(trajectory: Trajectory, row: WorkerRow) -> int:
        """Return how many tokens the worker has in its cache."""
        same = row.incarnation == trajectory.prefix_incarnation and row.version == trajectory.prefix_version
        return trajectory.cached_tokens if same else 0

    def _send(self, trajectory: Trajectory, route: Route, now: float) -> None:
        config = self._config
        row, prefill = route
        first = row if prefill is None else prefill
        allowance = self.allowance(trajectory)
        attempt = AttemptId(self._commands.new_op())
        self._commands.emit(
            Generate(
                attempt=attempt,
                trajectory=trajectory.id,
                turn=trajectory.turn,
                slot=row.slot,
                incarnation=row.incarnation,
                context_tokens=trajectory.tokens,
                max_new_tokens=allowance,
                greedy=trajectory.evaluation is not None,
                prefill_slot=None if prefill is None else prefill.slot,
                prefill_incarnation=Incarnation(0) if prefill is None else prefill.incarnation,
            )
        )
        trajectory.enter("generating")
        trajectory.attempt = attempt
        trajectory.slot = row.slot
        trajectory.queue_s += now - trajectory.since_s
        trajectory.since_s = now
        trajectory.home, trajectory.prefix_incarnation = first.slot, first.incarnation
        trajectory.prefix_version = first.version
        trajectory.reserved_tokens = trajectory.tokens + allowance
        row.running += 1
        row.reserved_tokens += trajectory.reserved_tokens
        if prefill is not None:
            trajectory.prefill_slot = prefill.slot
            prefill.running += 1
        self.state.attempts[attempt] = trajectory.id
        left = min(config.turn_deadline_s, config.trajectory_deadline_s - trajectory.spent_s)
        heapq.heappush(self.state.deadlines, (now + left, attempt))

    def next_deadline(self) -> float | None:
        """May belong to an attempt that has ended meanwhile; a Tick then finds nothing to do."""
        return self.state.deadlines[0][0] if self.state.deadlines else None

    def expired(self, now: float) -> list[TrajectoryId]:
        """Trajectories whose attempt has run past its deadline; each is told once."""
        found: list[TrajectoryId] = []
        deadlines = self.state.deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][1] not in self.state.attempts):
            _, attempt = heapq.heappop(deadlines)
            if attempt in self.state.attempts:
                found.append(self.state.attempts[attempt])
        return found


def _distinct(versions: Iterable[Version | None]) -> list[Version | None]:
    """Return the distinct values in order; there are one or two of them."""
    found: list[Version | None] = []
    for version in versions:
        if version not in found:
            found.append(version)
    return found
