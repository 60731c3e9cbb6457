"""The training half of the pipeline scheduler: step k trains version k into k + 1 on cohort k, exactly.

A trainer that dies restarts alone from its last checkpoint under a new lineage; updates since then are discarded,
samples made with dead weights are made again, and all others are trained as they are.
"""

import msgspec

from pearl.core.pipeline.buffer import Cohort
from pearl.core.pipeline.rollout import Rollout
from pearl.core.pipeline.trajectory import Trajectory
from pearl.types import events
from pearl.types.commands import RecordTrajectory, StartTrainer, Train, TrainSample
from pearl.types.core_context import CoreContext
from pearl.types.ids import Incarnation, OpId
from pearl.types.reports import NoteReport, StepReport, TrainingReport
from pearl.types.trainer_state import TrainerStatus
from pearl.types.trajectory import Outcome
from pearl.types.weights import Version


class Published(msgspec.Struct, frozen=True):
    """The version that workers shall serve, and its proof."""

    version: Version
    checksum: str


class Training:
    def __init__(self, context: CoreContext, rollout: Rollout) -> None:
        self.state = context.trainer
        self._config = context.config
        self._rollout = rollout
        self._lineages = context.lineages
        self._counters = context.counters
        self._commands = context.commands
        self._changes = context.changes

    def _set_status(self, status: TrainerStatus) -> None:
        self.state.status = status
        self._changes.mark()

    def start(self, now: float) -> None:
        state = self.state
        assert state.status == "gone", state
        self._set_status("starting")
        state.incarnation = Incarnation(state.incarnation + 1)
        state.lineage += 1
        state.op = self._commands.new_op()
        self._commands.emit(StartTrainer(state.op, state.incarnation, state.lineage, state.checkpoint_step))
        self._report(now, "starting")

    def _report(self, now: float, activity: str, reason: str = "") -> None:
        state = self.state
        self._commands.report(
            TrainingReport(
                now,
                activity=activity,
                incarnation=state.incarnation,
                step=state.step,
                lineage=state.lineage,
                gpus=",".join(f"local/{rank}" for rank in range(self._config.training.num_ranks)),
                reason=reason,
            )
        )

    # outcomes

    def on_ready(self, event: events.TrainerReady, now: float) -> Published | None:
        state = self.state
        if event.op != state.op or event.incarnation != state.incarnation:
            self._counters.stale_events += 1
            return None
        expected = Version(state.lineage, state.checkpoint_step or 0)
        assert event.version == expected, f"trainer came up with {event.version}, asked for {expected}"
        trained = state.step
        state.op, state.version = OpId(0), event.version
        self._set_status("idle")
        state.checkpoint_step, state.checksum = event.version.step, event.checksum
        state.checkpoint_s = now
        self._lineages.open(event.version)
        self._counters.updates_discarded += trained - event.version.step
        self._roll_back(event.version.step)
        if state.step_began_s == 0.0:
            state.step_began_s = now
        self._report(now, "idle")
        return Published(event.version, event.checksum)

    def _roll_back(self, step: int) -> None:
        """Cohorts from ``step`` on are to be trained (again)."""
        rollout = self._rollout
        for cohort in rollout.state.buffer.cohorts.values():
            if cohort.index >= step:
                cohort.status = "rollout"
        for trajectory in list(rollout.state.trajectories.values()):
            if trajectory.evaluation is not None or trajectory.cohort >= step:
                self._roll_back_one(trajectory)

    def _roll_back_one(self, trajectory: Trajectory) -> None:
        rollout = self._rollout
        alive = all(self._lineages.holds(version) for version in trajectory.versions())
        if trajectory.phase == "trained":
            self._count_trained(trajectory, -1)
            trajectory.enter("finished")
            trajectory.trained_step = None
        if alive:
            return
        if trajectory.phase == "finished":
            rollout.reopen_finished(trajectory, "lineage")
        else:
            rollout.restart_when_free(trajectory, "lineage")

    def on_lost(self, event: events.TrainerLost, now: float) -> bool:
        """Returns whether it was this life's."""
        state = self.state
        if event.incarnation != state.incarnation or state.status == "gone":
            self._counters.stale_events += 1
            return False
        state.op = OpId(0)
        self._set_status("gone")
        self._counters.trainers_lost += 1
        window = self._config.runtime.restart_window_s
        state.losses = [time for time in state.losses if time > now - window] + [now]
        self._report(now, "lost", event.reason)
        return True

    @property
    def has_failed(self) -> bool:
        return len(self.state.losses) > self._config.runtime.max_restarts

    # steps

    def train_when_complete(self, now: float) -> None:
        if not self.is_ready_to_train:
            return
        state, buffer = self.state, self._rollout.state.buffer
        cohort = buffer.get(state.step)
        cohort.status = "training"
        self._set_status("training")
        state.train_began_s = now
        state.op = self._commands.new_op()
        checkpoint = self._is_checkpoint_due(state.step + 1, now)
        samples = tuple(self._sample(trajectory) for trajectory in self._members(cohort))
        self._commands.emit(Train(state.op, state.incarnation, state.step, samples, checkpoint))
        self._report(now, "training")

    def _is_checkpoint_due(self, step: int, now: float) -> bool:
        """Whether the update that leads to ``step`` is saved: by steps or by time, whichever comes first."""
        training = self._config.training
        minutes = training.checkpoint_every_minutes
        is_time = minutes > 0 and now - self.state.checkpoint_s >= minutes * 60
        is_last = step >= self._rollout.state.buffer.num_steps
        return is_last or is_time or step % training.checkpoint_every == 0

    @property
    def is_ready_to_train(self) -> bool:
        """The training world idles, its batch is complete, and no evaluation still needs its weights."""
        state, rollout = self.state, self._rollout.state
        step = state.step
        if state.status != "idle" or step >= rollout.buffer.num_steps:
            return False
        evaluation = rollout.evaluation
        held = evaluation is not None and evaluation.step == step
        return rollout.buffer.get(step).is_complete and not held

    @property
    def has_nothing_to_learn_from(self) -> bool:
        """The cohort is complete, all of it is masked, and nothing was ever trained: it never worked."""
        state, buffer = self.state, self._rollout.state.buffer
        if self._counters.trajectories_trained or state.status != "idle" or state.step >= buffer.num_steps:
            return False
        cohort = buffer.get(state.step)
        return cohort.is_complete and all(t.outcome and t.outcome.is_masked for t in self._members(cohort))

    def _members(self, cohort: Cohort) -> list[Trajectory]:
        trajectories = self._rollout.state.trajectories
        return [trajectories[identity] for identity in self._rollout.state.buffer.members(cohort)]

    def next_members(self) -> list[Trajectory]:
        """The trajectories that the next step is trained on, as far as they are opened."""
        cohort = self._rollout.state.buffer.get(self.state.step)
        trajectories = self._rollout.state.trajectories
        return [trajectories[i] for i in self._rollout.state.buffer.members(cohort) if i in trajectories]

    @staticmethod
    def _sample(trajectory: Trajectory) -> TrainSample:
        assert trajectory.phase == "finished", trajectory
        assert trajectory.outcome is not None, trajectory
        return TrainSample(
            trajectory.id,
            trajectory.prompt,
            trajectory.reward,
            trajectory.outcome.is_masked,
            trajectory.tokens,
        )

    def on_finished(self, event: events.TrainFinished, now: float) -> Published | None:
        state = self.state
        if event.op != state.op or event.incarnation != state.incarnation:
            self._counters.stale_events += 1
            return None
        assert event.version == Version(state.lineage, state.step + 1), (event, state)
        cohort = self._rollout.state.buffer.get(state.step)
        members = self._members(cohort)
        staleness = self._mark_trained(members, state.step)
        cohort.status = "trained"
        self._count_step(event)
        self._report_step(event, members, staleness, now)
        self._note_unchanged(event, now)
        state.op, state.version = OpId(0), event.version
        self._set_status("idle")
        state.checksum = event.checksum
        if event.checkpoint_step is not None:
            state.checkpoint_step, state.checkpoint_s = event.checkpoint_step, now
            self._forget_before(event.checkpoint_step)
        state.step_seconds = now - state.step_began_s
        state.step_began_s, state.tokens_at_step = now, self._counters.tokens_generated
        self._report(now, "idle")
        return Published(event.version, event.checksum)

    def _mark_trained(self, members: list[Trajectory], step: int) -> list[int]:
        staleness = [step - t.start_version.step for t in members if t.start_version is not None]
        for trajectory in members:
            trajectory.enter("trained")
            trajectory.trained_step = step
            self._count_trained(trajectory, 1)
            self._commands.emit(RecordTrajectory(trajectory.record(self.state.lineage)))
        return staleness

    def _count_trained(self, trajectory: Trajectory, sign: int) -> None:
        assert trajectory.outcome is not None
        members = self.state.trained_members
        members[trajectory.prompt] = members.get(trajectory.prompt, 0) + sign
        if trajectory.outcome.is_masked:
            self._counters.trajectories_masked += sign
        else:
            self._counters.trajectories_trained += sign
            self._counters.tokens_trained += sign * trajectory.generated_tokens

    def _count_step(self, event: events.TrainFinished) -> None:
        counters = self._counters
        counters.max_logprob_gap = max(counters.max_logprob_gap, event.max_logprob_gap)
        counters.logprob_gap_tokens += event.logprob_gap_tokens

    def _report_step(
        self, event: events.TrainFinished, members: list[Trajectory], staleness: list[int], now: float
    ) -> None:
        state, counters = self.state, self._counters
        rewards = [t.reward for t in members if t.outcome is not None and not t.outcome.is_masked]
        reward = sum(rewards) / len(rewards) if rewards else None
        trained = sum(t.generated_tokens for t in members if t.outcome and not t.outcome.is_masked)
        generated = counters.tokens_generated - state.tokens_at_step
        seconds = now - state.step_began_s
        counters.max_staleness = max([counters.max_staleness, *staleness])
        if state.step == 0:
            counters.reward_first = reward
        counters.reward_last = reward
        self._commands.report(
            StepReport(
                now,
                step=state.step,
                lineage=state.lineage,
                seconds=seconds,
                train_seconds=now - state.train_began_s,
                reward_mean=reward,
                outcome_done=sum(t.outcome is Outcome.DONE for t in members),
                masked=len(members) - len(rewards),
                turns_mean=sum(len(t.turns) for t in members) / len(members),
                tokens_generated=generated,
                tokens_trained=trained,
                throughput_tokens_per_s=(generated + trained) / seconds if seconds > 0 else 0.0,
                max_staleness=max(staleness, default=0),
                mean_staleness=sum(staleness) / len(staleness) if staleness else 0.0,
                mean_token_age=_mean_token_age(members, state.step),
                max_logprob_gap=event.max_logprob_gap,
                logprob_gap_tokens=event.logprob_gap_tokens,
                checkpoint_step=event.checkpoint_step,
                weights_changed=event.checksum != state.checksum,
                metrics=event.metrics,
            )
        )

    def _note_unchanged(self, event: events.TrainFinished, now: float) -> None:
        if event.checksum == self.state.checksum:
            text = (
                f"step {self.state.step} changed no weight: version {event.version} is version "
                f"{self.state.version} again (nothing to learn from, or an update too small for the dtype)"
            )
            self._commands.report(NoteReport(now, text=text))

    # the prompt ledger: every prompt of a trained step is used by exactly its group_size members

    @property
    def prompts_trained_twice(self) -> int:
        return self.state.prompts_trained_twice + self._ledger(self.state.step)[0]

    @property
    def prompts_lost(self) -> int:
        return self.state.prompts_lost + self._ledger(self.state.step)[1]

    def _ledger(self, step: int) -> tuple[int, int]:
        """(prompts with too many members, with too few) in the cohorts before ``step`` still remembered."""
        buffer, counts = self._rollout.state.buffer, self.state.trained_members
        twice = lost = 0
        for cohort in buffer.cohorts.values():
            if cohort.index < step:
                for prompt in buffer.prompts(cohort):
                    used = counts.get(prompt, 0)
                    twice += used > buffer.group_size
                    lost += used < buffer.group_size
        return twice, lost

    def _reconcile_ledger(self, step: int) -> None:
        twice, lost = self._ledger(step)
        self.state.prompts_trained_twice += twice
        self.state.prompts_lost += lost
        buffer = self._rollout.state.buffer
        for cohort in buffer.cohorts.values():
            if cohort.index < step:
                for prompt in buffer.prompts(cohort):
                    self.state.trained_members.pop(prompt, None)

    def _forget_before(self, step: int) -> None:
        self._reconcile_ledger(step)
        rollout = self._rollout
        for trajectory in [t for t in rollout.state.trajectories.values() if t.phase == "trained"]:
            if trajectory.cohort < step:
                rollout.forget(trajectory)
        rollout.state.buffer.drop_before(step)


def _mean_token_age(members: list[Trajectory], step: int) -> float:
    """Updates between a token's version and its use, over all generated tokens."""
    ages = tokens = 0
    for trajectory in members:
        for turn in trajectory.turns:
            for run in turn.versions:
                ages += (step - run.version.step) * run.count
                tokens += run.count
    return ages / tokens if tokens else 0.0
