"""Attempts that workers have: what they stream is counted, their ends and the ends of their stages are kept straight.

Of a prefill-decode pair the decode stage makes the tokens and ends the attempt; the prefill stage is a load on its
worker until it is done. What becomes of the trajectory afterwards is for ``rollout``.
"""

from pearl.core.pipeline.trajectory import Trajectory
from pearl.types.commands import Abort
from pearl.types.core_context import CoreContext
from pearl.types.ids import AttemptId, TrajectoryId
from pearl.types.trajectory import FinishReason, TokenDelta
from pearl.types.worker_table import WorkerRow

WAITS_FOR_ATTEMPTS = ("leaving", "switching", "verified")
"""In these a worker may wait for the last of its attempts: verified while it turns to another role."""


class Attempts:
    def __init__(
        self,
        running: dict[AttemptId, TrajectoryId],
        trajectories: dict[TrajectoryId, Trajectory],
        context: CoreContext,
    ) -> None:
        self._running = running
        self._trajectories = trajectories
        self._table = context.table
        self._counters = context.counters
        self._commands = context.commands
        self._changes = context.changes

    def take(self, row: WorkerRow, delta: TokenDelta) -> Trajectory | None:
        """Count a delta of the worker; the trajectory when it is of an attempt that the worker itself carries on."""
        identity = self._running.get(delta.attempt)
        if identity is None:
            self._counters.stale_events += 1
            return None
        trajectory = self._trajectories[identity]
        self._count_prefill(trajectory, delta.prefilled_tokens)
        trajectory.add_delta(delta, row.slot)
        if row.slot != trajectory.slot:
            self._prefill_ended(trajectory, row, delta.finish)
            return None
        if trajectory.evaluation is None:
            self._counters.tokens_generated += delta.count
        else:
            self._counters.evaluation_tokens += delta.count
        return trajectory

    def _count_prefill(self, trajectory: Trajectory, tokens: int) -> None:
        turn = trajectory.turns[-1]
        first_time = max(0, min(tokens, turn.new_prompt_tokens - turn.prefilled_tokens))
        self._counters.prefilled_tokens += tokens
        self._counters.reprefilled_tokens += tokens - first_time

    def _prefill_ended(self, trajectory: Trajectory, row: WorkerRow, finish: FinishReason | None) -> None:
        """The prefill stage is done; when it failed, the decode stage waits in vain and is told so."""
        if trajectory.prefill_slot != row.slot:
            return  # what came after its end
        self._release_prefill(trajectory)
        if finish is None:
            row.errors = 0
            return
        decode = self._table.rows[trajectory.slot]
        row.errors += finish == "error"
        # Nothing asked for it: the hand-over failed, and a pair for which it always fails must not be tried for ever.
        if row.status == decode.status == "serving" and not trajectory.expired and not trajectory.restart:
            trajectory.errors += 1
            self.count_failure()
        trajectory.home = None
        self.abort(trajectory)

    def _release_prefill(self, trajectory: Trajectory) -> None:
        if trajectory.prefill_slot is not None:
            self._ended_on(self._table.rows[trajectory.prefill_slot])
            trajectory.prefill_slot = None

    def _ended_on(self, row: WorkerRow) -> None:
        row.running -= 1
        if row.status in WAITS_FOR_ATTEMPTS:
            self._changes.mark()

    def count_failure(self) -> None:
        """Count a failed attempt, of which a worker may have had too many."""
        self._counters.failed_attempts += 1
        self._changes.mark()

    def release(self, trajectory: Trajectory, row: WorkerRow, now: float) -> None:
        """The attempt is over on ``row``, its worker."""
        attempt, trajectory.attempt = trajectory.attempt, AttemptId(0)
        del self._running[attempt]
        trajectory.spent_s += now - trajectory.since_s
        trajectory.generate_s += now - trajectory.since_s
        self._ended_on(row)
        row.reserved_tokens -= trajectory.reserved_tokens
        if trajectory.prefill_slot is not None:  # it did not come to its end: it must not go on for nothing
            prefill = self._table.rows[trajectory.prefill_slot]
            self._commands.emit(Abort(attempt, prefill.slot, prefill.incarnation))
            self._release_prefill(trajectory)

    def lose(self, row: WorkerRow, now: float) -> list[Trajectory]:
        """The worker is gone: its attempts are over, and returned; those it prefilled for are aborted."""
        generating = [t for t in self._trajectories.values() if t.phase == "generating"]
        for trajectory in [t for t in generating if t.prefill_slot == row.slot]:
            self._release_prefill(trajectory)
            trajectory.home = None
            self.abort(trajectory)
        lost = [t for t in generating if t.slot == row.slot]
        for trajectory in lost:
            self.release(trajectory, row, now)
            trajectory.home = None
        return lost

    def abort(self, trajectory: Trajectory) -> None:
        row = self._table.rows[trajectory.slot]
        self._commands.emit(Abort(trajectory.attempt, row.slot, row.incarnation))
