"""The rollout half of the pipeline scheduler: from an opened episode to a finished trajectory.

Invariants: a trajectory waits for at most one thing (an attempt or an environment op), and is ended or started again
only when that thing has answered, so that what the core counts is what the token store holds; an environment's step
alone is given up at the trajectory's deadline, for its answer reaches neither once its episode is closed. Every
trajectory in flight is opening, ready, generating or stepping; each is finished exactly once.
"""

import heapq

import msgspec

from pearl.core.pipeline.attempts import Attempts
from pearl.core.pipeline.buffer import CohortBuffer
from pearl.core.pipeline.dispatcher import Dispatcher, DispatchState
from pearl.core.pipeline.evaluation import EvaluationRound, task_of
from pearl.core.pipeline.router import Strategy
from pearl.core.pipeline.trajectory import Trajectory
from pearl.types import events
from pearl.types.commands import (
    CloseEpisode,
    ForgetTokens,
    OpenEpisode,
    RecordTrajectory,
    StepEpisode,
    TruncateTokens,
    VoidTokens,
)
from pearl.types.core_context import CoreContext
from pearl.types.ids import OpId, PromptId, Slot, TrajectoryId
from pearl.types.reports import NoteReport
from pearl.types.trajectory import FinishReason, Outcome, Turn
from pearl.types.weights import Version
from pearl.types.worker_table import WorkerRow

MAX_ATTEMPT_ERRORS = 5
"""Failed attempts of one trajectory in a row before it is masked: more than one bad worker can cause on its own,
since a worker is replaced after three."""

RESUMED = "the coordinator was restarted"


class RolloutState(msgspec.Struct):
    buffer: CohortBuffer
    num_train_tasks: int = 0
    can_restore: bool = False
    last_failure: str = ""  # of an environment, for whoever must be told why nothing works
    trajectories: dict[TrajectoryId, Trajectory] = msgspec.field(default_factory=dict)
    ops: dict[OpId, TrajectoryId] = msgspec.field(default_factory=dict)
    in_flight: int = 0
    step_deadlines: list[tuple[float, OpId]] = msgspec.field(
        default_factory=list
    )  # a heap; of those that step
    evaluation: EvaluationRound | None = None
    dispatch: DispatchState = msgspec.field(default_factory=DispatchState)


class Rollout:
    def __init__(self, state: RolloutState, context: CoreContext, router: Strategy | None = None) -> None:
        self.state = state
        self._config = config = context.config
        self._table = table = context.table
        self._lineages = lineages = context.lineages
        self._counters = context.counters
        self._commands = commands_out = context.commands
        self._limit = config.rollout.max_in_flight or config.data.batch_size
        self._attempts = Attempts(state.dispatch.attempts, state.trajectories, context)
        self.dispatcher = Dispatcher(state.dispatch, config.rollout, table, lineages, commands_out, router)

    # opening

    def open_episodes(self, step: int) -> None:
        """Start trajectories while slots are free: an evaluation's first, then the oldest open cohort's."""
        state = self.state
        while state.in_flight < self._limit:
            evaluation = state.evaluation
            if evaluation is not None and evaluation.opened < evaluation.num_tasks:
                identity = evaluation.open_next()
                task = task_of(identity)
                self._open(Trajectory(identity, PromptId(task), -1, task, evaluation=evaluation.round))
                continue
            cohort = state.buffer.next_to_open(step)
            if cohort is None:
                return
            identity, prompt = state.buffer.open_next(cohort)
            task = prompt % state.num_train_tasks if state.num_train_tasks else int(prompt)
            self._open(Trajectory(identity, prompt, cohort.index, task))

    def _open(self, trajectory: Trajectory) -> None:
        self.state.trajectories[trajectory.id] = trajectory
        self.state.in_flight += 1
        self._open_environment(trajectory)

    def _open_environment(self, trajectory: Trajectory) -> None:
        """A fresh episode, or one brought back to the turns that the environment has answered."""
        trajectory.enter("opening")
        op = self._await_op(trajectory)
        self._commands.emit(
            OpenEpisode(
                op=op,
                trajectory=trajectory.id,
                evaluation=trajectory.evaluation is not None,
                task=trajectory.task,
                turns=max(trajectory.turn, 0),
            )
        )

    def _await_op(self, trajectory: Trajectory) -> OpId:
        trajectory.op = op = self._commands.new_op()
        self.state.ops[op] = trajectory.id
        return op

    # environment outcomes

    def _answered(self, op: OpId, trajectory_id: TrajectoryId) -> Trajectory | None:
        if self.state.ops.pop(op, None) is None:
            self._counters.stale_events += 1
            return None
        deadlines = self.state.step_deadlines
        while deadlines and deadlines[0][1] not in self.state.ops:
            heapq.heappop(deadlines)
        trajectory = self.state.trajectories[trajectory_id]
        trajectory.op = OpId(0)
        return trajectory

    def on_opened(self, event: events.EpisodeOpened, now: float) -> None:
        trajectory = self._answered(event.op, event.trajectory)
        if trajectory is None:
            return
        trajectory.env_open = True
        if not trajectory.turns:
            trajectory.tokens = event.prompt_tokens
            trajectory.reset_s = event.seconds
            trajectory.turns.append(Turn(new_prompt_tokens=event.prompt_tokens, env_seconds=event.seconds))
        if trajectory.restart:
            self.restart(trajectory)
        elif trajectory.step_pending:
            self._step_environment(trajectory, now)
        else:
            self._continue(trajectory, now)

    def on_stepped(self, event: events.EpisodeStepped, now: float) -> None:
        trajectory = self._answered(event.op, event.trajectory)
        if trajectory is None:
            return
        turn = trajectory.turns[-1]
        turn.env_seconds += event.seconds
        trajectory.spent_s += now - trajectory.since_s
        trajectory.tokens += event.observation_tokens
        trajectory.reward = event.reward
        trajectory.step_pending = False
        if trajectory.restart:
            self.restart(trajectory)
        elif event.done:
            self._finish(trajectory, Outcome.DONE)
        elif len(trajectory.turns) >= self._config.environment.max_turns:
            self._finish(trajectory, Outcome.TRUNCATED_TURNS)
        else:
            turn.retained_tokens = turn.generated_tokens
            trajectory.turns.append(Turn(new_prompt_tokens=event.observation_tokens))
            self._continue(trajectory, now)

    def on_failed(self, event: events.EpisodeFailed, now: float) -> None:
        """A dead environment is replayed where it can be; any other failure costs the trajectory its tokens."""
        trajectory = self._answered(event.op, event.trajectory)
        if trajectory is None:
            return
        self._note_failure(event, now)
        trajectory.env_open = False
        limit = self._config.environment.max_failures
        if trajectory.restart:
            self.restart(trajectory)
        elif not event.charged:  # the restarts of the workers are what bounds this
            self._interrupt(trajectory, f"environment {event.kind}")
        elif event.kind == "gone" and self.state.can_restore and trajectory.losses < limit:
            trajectory.losses += 1
            self._open_environment(trajectory)
        elif trajectory.failures < limit:
            trajectory.failures += 1
            self.restart(trajectory, f"environment {event.kind}")
        else:
            self._finish(trajectory, Outcome.INFRASTRUCTURE)

    def _interrupt(self, trajectory: Trajectory, reason: str) -> None:
        """Go on after something that is not the trajectory's own fault, and is not counted against it."""
        if self.state.can_restore or trajectory.turn < 1:
            self._open_environment(trajectory)
        else:
            self.restart(trajectory, reason)

    def _note_failure(self, event: events.EpisodeFailed, now: float) -> None:
        """Tell the person of the 1st, 10th, 100th, ...: never silent, never a flood."""
        self._counters.environment_failures += 1
        self.state.last_failure = f"{event.kind}: {event.reason}"
        count = str(self._counters.environment_failures)
        if count.strip("0") == "1":
            text = f"environment failure {count} (trajectory {event.trajectory}): {self.state.last_failure}"
            self._commands.report(NoteReport(now, text=text))

    def _continue(self, trajectory: Trajectory, now: float) -> None:
        """Queue the turn for a worker, when there is room for at least one more token."""
        if self.dispatcher.allowance(trajectory) <= 0:
            self._finish(trajectory, Outcome.TRUNCATED_CONTEXT)
        elif trajectory.spent_s >= self._config.rollout.trajectory_deadline_s:
            self._finish(trajectory, Outcome.EXPIRED)
        else:
            self.dispatcher.push(trajectory, now)

    def _step_environment(self, trajectory: Trajectory, now: float) -> None:
        trajectory.step_pending = True
        if not trajectory.env_open:
            self._open_environment(trajectory)
            return
        trajectory.enter("stepping")
        trajectory.since_s = now
        op = self._await_op(trajectory)
        self._commands.emit(
            StepEpisode(op=op, trajectory=trajectory.id, turn=trajectory.turn, truncated=trajectory.truncated)
        )
        left = max(0.0, self._config.rollout.trajectory_deadline_s - trajectory.spent_s)
        heapq.heappush(self.state.step_deadlines, (now + left, op))

    # worker outcomes

    def on_tokens(self, event: events.TokensStreamed, now: float) -> bool:
        """Returns whether an attempt ended, so that there is something to schedule."""
        row = self._table.current(event.slot, event.incarnation)
        if row is None:
            self._counters.stale_events += 1
            return False
        ended = False
        for delta in event.deltas:
            row.streamed_tokens += delta.count
            trajectory = self._attempts.take(row, delta)
            if trajectory is not None and delta.finish is not None:
                ended = True
                self._attempt_ended(trajectory, row, delta.finish, now)
        return ended

    def _attempt_ended(
        self, trajectory: Trajectory, row: WorkerRow, finish: FinishReason, now: float
    ) -> None:
        self._attempts.release(trajectory, row, now)
        is_pair = row.slot != trajectory.home  # the prefill worker lacks what was made here
        trajectory.cached_tokens = trajectory.tokens - is_pair * trajectory.turns[-1].generated_tokens
        if finish == "error":
            row.errors += 1
            trajectory.errors += 1
            self._attempts.count_failure()
        elif finish != "abort":
            row.errors = trajectory.errors = 0
        if trajectory.restart:
            self.restart(trajectory)
        elif trajectory.expired or trajectory.errors >= MAX_ATTEMPT_ERRORS:
            self._finish(trajectory, Outcome.EXPIRED if trajectory.expired else Outcome.INFRASTRUCTURE)
        elif finish in ("abort", "error"):
            self._interrupted(trajectory, now)
        else:
            self._turn_ended(trajectory, finish == "length", now)

    def _turn_ended(self, trajectory: Trajectory, truncated: bool, now: float) -> None:
        turn_left = self._config.rollout.max_new_tokens_per_turn - trajectory.turns[-1].generated_tokens
        if truncated and turn_left > 0:  # the context ended the turn, not the turn's own limit
            self._finish(trajectory, Outcome.TRUNCATED_CONTEXT)
            return
        trajectory.truncated = truncated
        self._step_environment(trajectory, now)

    def _interrupted(self, trajectory: Trajectory, now: float) -> None:
        self._counters.interrupted_trajectories += 1
        if self.dispatcher.allowance(trajectory) <= 0:
            self._turn_ended(trajectory, True, now)
        else:
            self.dispatcher.push(trajectory, now)

    def on_worker_lost(self, slot: Slot, now: float) -> None:
        """Continue a lost worker's attempts elsewhere from the tokens they have streamed."""
        row = self._table.rows[slot]
        for trajectory in self._attempts.lose(row, now):
            if trajectory.restart:
                self.restart(trajectory)
            elif trajectory.expired:
                self._finish(trajectory, Outcome.EXPIRED)
            else:
                self._interrupted(trajectory, now)
        assert row.running == 0, row

    def next_deadline(self) -> float | None:
        """May belong to something that has ended meanwhile; a Tick then finds nothing to do."""
        found = [self.state.step_deadlines[0][0]] if self.state.step_deadlines else []
        attempts = self.dispatcher.next_deadline()
        return min(found if attempts is None else [*found, attempts], default=None)

    def on_tick(self, now: float) -> None:
        self._end_late_steps(now)
        for identity in self.dispatcher.expired(now):
            trajectory = self.state.trajectories[identity]
            trajectory.expired = True
            self._attempts.abort(trajectory)

    def _end_late_steps(self, now: float) -> None:
        """End environment steps that run past their trajectory's deadline: closing the episode cancels them."""
        deadlines = self.state.step_deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][1] not in self.state.ops):
            _, op = heapq.heappop(deadlines)
            identity = self.state.ops.pop(op, None)
            if identity is None:
                continue
            trajectory = self.state.trajectories[identity]
            trajectory.op = OpId(0)
            trajectory.spent_s += now - trajectory.since_s
            trajectory.turns[-1].env_seconds += now - trajectory.since_s
            if trajectory.restart:
                self.restart(trajectory)
            else:
                self._finish(trajectory, Outcome.EXPIRED)

    def resume(self) -> None:
        """After a crash no environment lives and no op will answer. What was stored but never journalled is cut
        off; an environment is opened again, with its turns replayed, when its trajectory needs it next. Where turns
        cannot be replayed, the trajectory begins again, which is no failure of its own."""
        self.state.ops.clear()
        trajectories = list(self.state.trajectories.values())
        for trajectory in trajectories:
            trajectory.op, trajectory.env_open = OpId(0), False
            self._commands.emit(TruncateTokens(trajectory.id, trajectory.tokens))
        for trajectory in trajectories:
            if trajectory.phase in ("opening", "stepping"):
                if trajectory.restart:
                    self.restart(trajectory)
                else:
                    self._interrupt(trajectory, RESUMED)
            elif not self.state.can_restore and trajectory.turn >= 1:
                if trajectory.phase == "ready":
                    self.restart(trajectory, RESUMED)
                elif trajectory.phase == "generating":
                    trajectory.restart = RESUMED  # once the loss of its worker has been heard of

    # starting again and ending

    def restart(self, trajectory: Trajectory, reason: str = "") -> None:
        """Throw its tokens away and begin again; only while it waits for nothing."""
        assert not trajectory.attempt, trajectory
        assert not trajectory.op, trajectory
        reason = reason or trajectory.restart
        self._discard(trajectory, reason)
        trajectory.reset_tokens()
        self._open_environment(trajectory)

    def _discard(self, trajectory: Trajectory, reason: str) -> None:
        counters = self._counters
        counters.trajectories_restarted += 1
        counters.tokens_discarded += trajectory.generated_tokens
        self._commands.emit(RecordTrajectory(trajectory.record(self._lineages.newest, reason)))
        self._commands.emit(VoidTokens(trajectory.id))
        self._close(trajectory)

    def restart_when_free(self, trajectory: Trajectory, reason: str) -> None:
        """Restart a trajectory after what it waits for has answered."""
        if trajectory.phase == "ready":
            self.restart(trajectory, reason)
            return
        trajectory.restart = reason
        if trajectory.phase == "generating":
            self._attempts.abort(trajectory)

    def restart_mixed(self, version: Version) -> None:
        """Restart trajectories that would continue under other weights than they began with (partial rollout off)."""
        for trajectory in list(self.state.trajectories.values()):
            begun = trajectory.end_version
            if (
                begun is not None
                and begun.step != version.step
                and trajectory.phase not in ("finished", "trained")
            ):
                self.restart_when_free(trajectory, "partial rollout is off")

    def reopen_finished(self, trajectory: Trajectory, reason: str) -> None:
        """A finished (or trained) member whose weights died with their lineage is made again."""
        self.state.buffer.get(trajectory.cohort).finished -= 1
        self.state.in_flight += 1
        self.restart(trajectory, reason)

    def _close(self, trajectory: Trajectory) -> None:
        if trajectory.env_open:
            trajectory.env_open = False
            self._commands.emit(CloseEpisode(trajectory.id))

    def _finish(self, trajectory: Trajectory, outcome: Outcome) -> None:
        trajectory.enter("finished")
        trajectory.outcome = outcome
        self._close(trajectory)
        self.state.in_flight -= 1
        if outcome is Outcome.EXPIRED:
            self._counters.expired_trajectories += 1
        if trajectory.evaluation is None:
            self.state.buffer.get(trajectory.cohort).finished += 1
        else:
            self._finish_evaluation(trajectory, outcome)

    def _finish_evaluation(self, trajectory: Trajectory, outcome: Outcome) -> None:
        evaluation = self.state.evaluation
        assert evaluation is not None, trajectory
        assert evaluation.round == trajectory.evaluation, (evaluation, trajectory)
        evaluation.finished += 1
        evaluation.tokens += trajectory.generated_tokens
        if outcome.is_masked:
            evaluation.masked += 1
        else:
            evaluation.reward_sum += trajectory.reward
        self._commands.emit(RecordTrajectory(trajectory.record(self._lineages.newest)))
        self.forget(trajectory)

    def forget(self, trajectory: Trajectory) -> None:
        del self.state.trajectories[trajectory.id]
        self._commands.emit(ForgetTokens(trajectory.id))

    def drop(self, trajectory: Trajectory, reason: str, now: float) -> None:
        """Take a trajectory in flight out of the run; late answers to it are stale."""
        if trajectory.attempt:
            self._attempts.abort(trajectory)
            self._attempts.release(trajectory, self._table.rows[trajectory.slot], now)
        if trajectory.op:
            del self.state.ops[trajectory.op]
        if trajectory.phase != "finished":
            self.state.in_flight -= 1
        self._discard(trajectory, reason)
        self.forget(trajectory)
