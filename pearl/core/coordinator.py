"""The whole policy as one pure object: ``handle(event, now) -> commands``.

No clock, no randomness, no I/O. The same events at the same times give the same commands, so a journal can be
replayed and a run's bug is a test. ``now`` is in seconds since the run's start and never goes back.
"""

from typing import assert_never

import msgspec

from pearl.core import summary
from pearl.core.elastic.runtime_tracker import TrajectorySample
from pearl.core.elastic.scheduler import ElasticScheduler, TrainingDemand
from pearl.core.invariants import check
from pearl.core.pipeline.agreement import disagreement
from pearl.core.pipeline.buffer import CohortBuffer
from pearl.core.pipeline.evaluation import EvaluationRound
from pearl.core.pipeline.rollout import Rollout
from pearl.core.pipeline.router import Strategy
from pearl.core.pipeline.training import Published, Training
from pearl.core.pipeline.trajectory import Trajectory
from pearl.core.state import CoreState, fresh_state
from pearl.types import events
from pearl.types.change_flag import ChangeFlag
from pearl.types.command_buffer import CommandBuffer
from pearl.types.commands import AnyCommand, Finish
from pearl.types.config import Config
from pearl.types.core_context import CoreContext
from pearl.types.events import AnyEvent
from pearl.types.exit_codes import EXIT_FAILURE
from pearl.types.gpu_table import AWAITED_HOST, POOLS
from pearl.types.profile import Profile
from pearl.types.reports import ComparisonReport, EvaluationReport, NoteReport
from pearl.types.worker_table import WorkerRow


class Coordinator:
    def __init__(
        self, config: Config, state: CoreState | None = None, router: Strategy | None = None
    ) -> None:
        """``router`` is a person's own, loaded by the caller: the core imports nothing by name."""
        self._config = config
        self._state = state = state if state is not None else fresh_state(config)
        self._commands = CommandBuffer(state.next_op)
        self._now = state.first_now  # of the newest event
        self._changes = ChangeFlag()
        context = CoreContext(
            config,
            state.table,
            state.elastic.gpu_table,
            state.trainer,
            state.lineages,
            state.counters,
            self._commands,
            self._changes,
        )
        self._elastic = ElasticScheduler(state.elastic, context)
        self._rollout = Rollout(state.rollout, context, router)
        self._training = Training(context, self._rollout)

    @classmethod
    def restore(cls, config: Config, snapshot: bytes, router: Strategy | None = None) -> "Coordinator":
        return cls(config, msgspec.msgpack.decode(snapshot, type=CoreState), router)

    def snapshot(self) -> bytes:
        self._state.next_op = self._commands.next_op
        return msgspec.msgpack.encode(self._state)

    @property
    def finished(self) -> bool:
        """Whether ``Finish`` has been given."""
        return self._state.phase in ("stopped", "finished")

    def next_wakeup(self) -> float | None:
        """Return when a Tick is due; None means only when something else happens."""
        if self.finished:
            return None
        deadline, wakeup = self._rollout.next_deadline(), self._elastic.next_wakeup()
        if deadline is None or wakeup is None:
            return wakeup if deadline is None else deadline
        return min(deadline, wakeup)

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Take one event; returns the commands it leads to, in order. After ``Finish`` only Resumed has any."""
        self._now = now
        resumed = isinstance(event, events.Resumed)
        if (resumed or not self.finished) and self._apply(event, now) and not self.finished:
            self._advance(now)
        return self._commands.take()

    def _apply(self, event: AnyEvent, now: float) -> bool:
        """Returns whether there may be something new to schedule."""
        match event:
            case events.TokensStreamed():
                self._measure(event)
                return self._rollout.on_tokens(event, now)
            case events.EpisodeOpened():
                self._rollout.on_opened(event, now)
            case events.EpisodeStepped():
                self._rollout.on_stepped(event, now)
            case events.EpisodeFailed():
                self._rollout.on_failed(event, now)
            case events.WorkerReady():
                return self._counted(self._elastic.lifecycle.on_ready(event, now))
            case events.WeightsVerified():
                return self._counted(self._elastic.lifecycle.on_verified(event, self._state.published, now))
            case events.WeightsFailed():
                return self._counted(
                    self._elastic.lifecycle.on_update_failed(event, self._state.published, now)
                )
            case events.WorkerLost():
                self._on_worker_lost(event, now)
            case events.WorkerReleased():
                return self._counted(self._elastic.lifecycle.on_released(event, now))
            case events.RoleSet():
                return self._counted(self._elastic.roles.on_role_set(event, now))
            case events.PreemptRequested():
                self._elastic.on_preempt_requested(event, now)
            case events.GpusArrived():
                self._elastic.on_arrived(event, now)
            case events.GpusReclaimed():
                self._elastic.on_reclaimed(event, now)
            case events.HostLost():
                self._elastic.on_host_lost(event, now)
            case events.TrainingOffloaded():
                return self._counted(self._elastic.toggle.on_offloaded(event, now))
            case events.TrainingRestored():
                return self._counted(self._elastic.toggle.on_restored(event, now))
            case events.TrainerReady():
                self._publish(self._training.on_ready(event, now))
            case events.Compared():
                self._on_compared(event, now)
            case events.TrainFinished():
                self._on_trained(event, now)
            case events.TrainerLost():
                self._on_trainer_lost(event, now)
            case events.Tick():
                self._rollout.on_tick(now)
                self._changes.mark()  # by time alone something may be due
            case events.Started():
                self._on_started(event, now)
            case events.Resumed():
                self._on_resumed(event, now)
            case events.StopRequested():
                self._finish(now, f"stopped by signal {event.signal}", 128 + event.signal)
            case _:
                assert_never(event)
        return True

    def _counted(self, awaited: bool) -> bool:
        if not awaited:
            self._state.counters.stale_events += 1
        return awaited

    def _publish(self, published: Published | None) -> None:
        if published is None:
            return
        self._state.published = published
        if not self._config.rollout.partial_rollout:
            self._rollout.restart_mixed(published.version)

    def _advance(self, now: float) -> None:
        """Do everything that a change may allow, in the order in which one thing enables the next."""
        self._end_evaluation(now)
        if self.finished:
            return
        state, elastic, rollout = self._state, self._elastic, self._rollout
        demand = self._demand()
        elastic.advance(demand, state.published, now)
        if state.trainer.status == "gone" and elastic.toggle.training_holds_gpus:
            elastic.toggle.acquire_for_training()
            self._training.start(now)
        self._begin_final_evaluation()
        if state.published is not None:
            rollout.open_episodes(state.trainer.step)
            rollout.dispatcher.dispatch(state.rollout.trajectories, state.rollout.evaluation, now)
        if self._training.has_nothing_to_learn_from:
            self._give_up(now, "every trajectory of the first step")
            return
        if not demand.remaining and elastic.toggle.training_holds_gpus:
            self._training.train_when_complete(now)
        self._finish_when_done(now)

    def _demand(self) -> TrainingDemand:
        trainer, buffer = self._state.trainer, self._state.rollout.buffer
        step = trainer.step
        steps_left = buffer.num_steps - step
        cohort = buffer.get(step) if steps_left > 0 else None
        remaining = 0 if cohort is None else cohort.num_members - cohort.finished
        waits = trainer.status != "idle" or (not remaining and self._training.is_ready_to_train)
        return TrainingDemand(waits, remaining, self._config.data.batch_size, steps_left)

    # life of the run

    def _on_started(self, event: events.Started, now: float) -> None:
        state = self._state
        assert state.phase == "new", "Started comes once, first"
        state.phase = "running"
        state.first_now = now
        total = event.num_train_tasks * self._config.data.num_epochs
        state.rollout.buffer = CohortBuffer.build(self._config, total)
        state.rollout.num_train_tasks = event.num_train_tasks
        state.rollout.can_restore = event.can_restore
        if state.rollout.buffer.num_steps < self._config.run.num_steps:
            self._commands.report(
                NoteReport(
                    now,
                    text=f"the data ends after {state.rollout.buffer.num_steps} steps ({total} prompts), before "
                    f"run.num_steps = {self._config.run.num_steps}",
                )
            )
        wanted = self._config.environment.num_evaluation_tasks
        available = event.num_evaluation_tasks
        state.num_evaluation_tasks = min(wanted, available) if available else wanted
        self._begin_evaluation(0)
        self._elastic.reserved.bind(event.reserved)
        self._elastic.start(now)

    def _on_resumed(self, event: events.Resumed, now: float) -> None:
        """Every process of the former life is gone: all that was awaited will never come."""
        state = self._state
        assert state.phase in ("running", "stopped"), f"a run that is {state.phase} cannot be resumed"
        state.phase = "running"
        state.published = None
        self._rollout.resume()
        for row in state.table.rows.values():
            if row.status != "gone":
                self._rollout.on_worker_lost(row.slot, now)
        self._elastic.on_resumed(now)
        if state.trainer.status != "gone":
            self._training.on_lost(events.TrainerLost(state.trainer.incarnation, "the run was resumed"), now)
        state.trainer.losses.clear()
        self._elastic.reserved.bind(event.reserved)
        self._elastic.start(now)

    def _on_worker_lost(self, event: events.WorkerLost, now: float) -> None:
        row = self._state.table.current(event.slot, event.incarnation)
        if row is None:
            self._state.counters.stale_events += 1
            return
        self._count_loss(row, event)
        self._rollout.on_worker_lost(row.slot, now)
        if error := self._elastic.on_lost(row, event.reason, now, is_final=event.is_final):
            self._finish(now, error, EXIT_FAILURE)

    def _count_loss(self, row: WorkerRow, event: events.WorkerLost) -> None:
        counters = self._state.counters
        if row.stop_is_planned:
            counters.tokens_lost_planned += max(0, (event.produced_tokens or 0) - row.streamed_tokens)
            return
        counters.workers_lost += 1
        if event.produced_tokens is not None:
            counters.tokens_lost += max(0, event.produced_tokens - row.streamed_tokens)
        elif row.running:
            counters.tokens_lost_unknown += 1

    def _measure(self, event: events.TokensStreamed) -> None:
        row = self._state.table.current(event.slot, event.incarnation)
        if row is not None and event.iterations is not None:
            self._elastic.on_iterations(row, event.iterations)

    def _on_compared(self, event: events.Compared, now: float) -> None:
        counters, found = self._state.counters, event.comparison
        counters.compared_tokens += found.num_tokens
        counters.comparison_max_gap = max(counters.comparison_max_gap, found.max_gap)
        counters.comparisons_skipped += bool(found.skipped)
        if event.slot is not None and (row := self._state.table.current(event.slot, event.incarnation)):
            row.streamed_tokens += found.generated_tokens  # sampled, and lost to nobody
        self._commands.report(
            ComparisonReport(
                now,
                part=event.part,
                slot=event.slot,
                num_tokens=found.num_tokens,
                mean_gap=found.mean_gap,
                max_gap=found.max_gap,
                generated_tokens=found.generated_tokens,
                seconds=found.seconds,
                skipped=found.skipped or msgspec.UNSET,
                error=found.error or msgspec.UNSET,
            )
        )
        if found.error:
            way_out = "agreement.at_start = false leaves this comparison away, and with it what it finds"
            self._finish(now, f"{found.error}; {way_out}", EXIT_FAILURE)

    def _on_trained(self, event: events.TrainFinished, now: float) -> None:
        began = self._state.trainer.step_began_s
        members = self._training.next_members()
        published = self._training.on_finished(event, now)
        if published is not None:
            self._elastic.on_step([sample_of(member) for member in members], began, now)
            if error := disagreement(event, self._state.gaps, self._config):
                self._finish(now, error, EXIT_FAILURE)
                return
        self._publish(published)
        self._stop_early(now)

    def _on_trainer_lost(self, event: events.TrainerLost, now: float) -> None:
        if not self._training.on_lost(event, now):
            return
        self._state.published = None  # the snapshot went with its process
        self._elastic.toggle.on_trainer_lost(now)
        if event.is_final:
            self._finish(now, f"the training world cannot start: {event.reason}", EXIT_FAILURE)
        elif self._training.has_failed:
            runtime = self._config.runtime
            self._finish(
                now,
                f"the training world died {len(self._state.trainer.losses)} times in "
                f"{runtime.restart_window_s:.0f} s, last: {event.reason}. Its logs are in logs/; "
                f"runtime.max_restarts = {runtime.max_restarts} allows more",
                EXIT_FAILURE,
            )

    # evaluation

    def _begin_evaluation(self, step: int) -> None:
        state = self._state
        if state.num_evaluation_tasks:
            state.rollout.evaluation = EvaluationRound(
                state.evaluation_rounds, step, state.num_evaluation_tasks
            )
            state.evaluation_rounds += 1

    def _begin_final_evaluation(self) -> None:
        state = self._state
        if not state.num_evaluation_tasks:
            return
        trainer = state.trainer
        at_end = trainer.status == "idle" and trainer.step == state.rollout.buffer.num_steps > 0
        if at_end and state.rollout.evaluation is None and state.counters.eval_reward is None:
            self._begin_evaluation(trainer.step)

    def _end_evaluation(self, now: float) -> None:
        state = self._state
        evaluation = state.rollout.evaluation
        if evaluation is None:
            return
        if state.trainer.status == "idle" and evaluation.step != state.trainer.step:
            self._cancel_evaluation(now)
            return
        if not evaluation.is_complete:
            return
        state.rollout.evaluation = None
        if evaluation.masked == evaluation.num_tasks:
            self._give_up(now, f"each of the {evaluation.num_tasks} evaluation tasks")
            return
        if evaluation.step == 0:
            state.counters.eval_reward_start = evaluation.reward_mean
            state.trainer.step_began_s = now  # the first step is not charged for the evaluation
        else:
            state.counters.eval_reward = evaluation.reward_mean
        self._commands.report(
            EvaluationReport(
                now,
                round=evaluation.round,
                step=evaluation.step,
                reward_mean=evaluation.reward_mean,
                tasks=evaluation.num_tasks,
                masked=evaluation.masked,
                tokens=evaluation.tokens,
            )
        )

    def _cancel_evaluation(self, now: float) -> None:
        """A restore took the evaluated step back: the round is void and will be held again."""
        state = self._state
        for trajectory in [t for t in state.rollout.trajectories.values() if t.evaluation is not None]:
            self._rollout.drop(trajectory, "evaluation cancelled", now)
        state.rollout.evaluation = None

    # the end

    def _give_up(self, now: float, what: str) -> None:
        """Going on would only look like a run."""
        cause = self._state.rollout.last_failure or "deadlines or failed attempts; see coordinator.log"
        self._finish(
            now,
            f"{what} failed and is masked, so there is nothing to learn from; last: {cause}",
            EXIT_FAILURE,
        )

    def _stop_early(self, now: float) -> None:
        state, counters = self._state, self._state.counters
        goal = self._config.run.stop_at_reward
        buffer = state.rollout.buffer
        step = state.trainer.step
        if (
            goal is None
            or counters.reward_last is None
            or counters.reward_last < goal
            or step >= buffer.num_steps
        ):
            return
        buffer.num_steps = step
        for trajectory in [t for t in state.rollout.trajectories.values() if t.cohort >= step]:
            self._rollout.drop(trajectory, "ended early", now)
        buffer.drop_from(step)
        self._commands.report(
            NoteReport(now, text=f"reward {counters.reward_last:.3f} reached {goal}: ending early")
        )

    def _finish_when_done(self, now: float) -> None:
        state = self._state
        trainer = state.trainer
        done = trainer.status == "idle" and trainer.step >= state.rollout.buffer.num_steps
        if done and state.rollout.evaluation is None:
            self._finish(now, "", 0)

    def _finish(self, now: float, error: str, exit_code: int) -> None:
        self._state.phase = "finished" if exit_code == 0 else "stopped"
        values = summary.summarize(self._state, self._training, self._config, now)
        self._commands.emit(Finish(summary=values, error=error, exit_code=exit_code))

    # for people and tests

    def status(self) -> dict[str, object]:
        """Return what ``pearl status --json`` prints."""
        return summary.status(self._state, self._now)

    def host_pools(self) -> dict[str, str]:
        """Return the pool of each other host that has ever taken part in the run."""
        rows = self._state.elastic.gpu_table.rows.values()
        own = {row.host for row in rows if row.zone == "training"} | {AWAITED_HOST}
        return {row.host: POOLS[row.zone] for row in rows if row.host not in own}

    def profile(self) -> Profile | None:
        """Return what the run has measured of its workload and platform; None until there is enough."""
        return self._elastic.tracker.profile()

    def check(self) -> None:
        """Invariants that hold between events; AssertionError otherwise."""
        check(self._state, self._config)
        self._elastic.check()


def sample_of(trajectory: Trajectory) -> TrajectorySample:
    """Return what the runtime tracker needs of a trajectory."""
    return TrajectorySample(trajectory.turns, trajectory.generate_s, trajectory.queue_s)
