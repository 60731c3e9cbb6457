"""Rules of the core, each as a short conversation on the virtual clock."""

import heapq

import msgspec
import pytest
from test_core import assert_clean, make_config, training_records

from pearl.testing.world import World
from pearl.types import commands, events
from pearl.types.config import Config, DataConfig, EnvironmentConfig, RolloutConfig, RunConfig
from pearl.types.ids import Slot
from pearl.types.reports import StepReport
from pearl.types.trajectory import TokenDelta, VersionRun
from pearl.types.weights import Version


@pytest.mark.scenario("ST-04")
def test_every_opened_trajectory_is_accounted_for_at_every_event() -> None:
    """Opened = in flight + finished + trained, whatever finishes first; surplus groups wait in their cohort."""
    world = World(make_config(staleness_bound=2, max_in_flight=64), seed=3)
    world.start()
    opened: set[int] = set()
    while world.finish is None:
        world.step()
        for command in world.entries[-1][2]:
            if isinstance(command, commands.OpenEpisode) and not command.evaluation:
                opened.add(command.trajectory)
        state = world.core._state.rollout
        kept = {i for i, t in state.trajectories.items() if t.evaluation is None}
        forgotten = {r.trajectory for r in training_records(world) if r.trained_step is not None} - kept
        assert opened == kept | forgotten
        assert not kept & forgotten
    assert_clean(world, 5)


def start_with_delays(world: World, first: type, last: type) -> None:
    """Let all events of ``first`` come before any of ``last`` during the start."""
    world.start()
    world.queue = [
        (at + (100.0 if isinstance(event, last) else 0.0), number, event) for at, number, event in world.queue
    ]
    assert any(isinstance(event, first) for _, _, event in world.queue)
    world.queue.sort()


@pytest.mark.parametrize(
    ("first", "last"),
    [(events.WorkerReady, events.TrainerReady), (events.TrainerReady, events.WorkerReady)],
)
@pytest.mark.scenario("CK-03")
def test_a_start_never_deadlocks(first: type, last: type) -> None:
    world = World(make_config(), seed=4)
    start_with_delays(world, first, last)
    world.run()
    assert_clean(world, 5)


@pytest.mark.scenario("CK-03")
def test_a_resume_with_one_worker_missing_goes_on_at_the_checkpoint() -> None:
    world = World(make_config(), seed=5)
    world.start()
    while world.core._state.trainer.step < 3:
        world.step()
    world.crash()
    version = Version(1, world.core._state.trainer.checkpoint_step or 0)
    world.queue = [
        e for e in world.queue if not (isinstance(e[2], events.WorkerReady) and e[2].slot == Slot(1))
    ]
    world.workers.pop(Slot(1))
    served: list[Version | None] = []
    while not served:
        world.step()
        requests = [c for c in world.entries[-1][2] if isinstance(c, commands.Generate)]
        served.extend(world.workers[request.slot].version for request in requests)
    assert served == [version] * len(served)
    world.run()
    assert_clean(world, 5)


def only_attempt(world: World) -> commands.Generate:
    """Drive until a training attempt is sent, and take what the world would answer to it."""
    while True:
        world.step()
        for command in world.entries[-1][2]:
            if isinstance(command, commands.Generate):
                world.queue = [e for e in world.queue if not isinstance(e[2], events.TokensStreamed)]
                world.workers[command.slot].running.clear()
                return command


def stream(
    world: World, attempt: commands.Generate, count: int, finish: str | None
) -> list[commands.AnyCommand]:
    version = Version(0, 0)
    delta = TokenDelta(attempt.attempt, count, (VersionRun(version, count, version),), 0, finish)  # type: ignore[arg-type]
    return world.feed(events.TokensStreamed(attempt.slot, attempt.incarnation, (delta,)))


def small_world(max_context_tokens: int, max_new_tokens_per_turn: int = 4) -> World:
    config = make_config(
        num_workers=1,
        max_requests_per_worker=1,
        max_in_flight=1,
        max_context_tokens=max_context_tokens,
        max_new_tokens_per_turn=max_new_tokens_per_turn,
    )
    environment = msgspec.structs.replace(config.environment, num_evaluation_tasks=0)
    world = World(msgspec.structs.replace(config, environment=environment), seed=6)
    world.start()
    return world


@pytest.mark.scenario("TK-06")
def test_a_turn_is_never_asked_for_more_than_the_context_holds() -> None:
    world = small_world(max_context_tokens=7)  # the first prompt has 5
    attempt = only_attempt(world)
    assert attempt.max_new_tokens == 2
    stream(world, attempt, 2, "length")
    (record,) = [t for t in world.core._state.rollout.trajectories.values() if t.phase == "finished"]
    assert record.outcome == "truncated_context"
    assert not record.outcome.is_masked


@pytest.mark.scenario("TK-06")
def test_an_observation_that_leaves_no_room_ends_the_trajectory() -> None:
    world = small_world(max_context_tokens=10)
    attempt = only_attempt(world)
    commands_ = stream(world, attempt, 2, "stop")
    (step,) = [c for c in commands_ if isinstance(c, commands.StepEpisode)]
    world.queue = [
        e for e in world.queue if not isinstance(e[2], events.EpisodeStepped | events.EpisodeFailed)
    ]
    world.feed(events.EpisodeStepped(step.op, step.trajectory, 3, 0.0, False, 0.1))
    trajectory = world.core._state.rollout.trajectories[step.trajectory]
    assert (trajectory.phase, trajectory.outcome) == ("finished", "truncated_context")


@pytest.mark.scenario("TK-06")
def test_a_turn_at_its_own_limit_goes_to_the_environment_as_truncated() -> None:
    world = small_world(max_context_tokens=100)
    attempt = only_attempt(world)
    (step,) = [c for c in stream(world, attempt, 4, "length") if isinstance(c, commands.StepEpisode)]
    assert step.truncated


@pytest.mark.scenario("PR-03")
def test_a_resumed_turn_is_asked_for_what_is_left() -> None:
    world = small_world(max_context_tokens=1000, max_new_tokens_per_turn=100)
    attempt = only_attempt(world)
    assert attempt.max_new_tokens == 100
    (again,) = [c for c in stream(world, attempt, 60, "abort") if isinstance(c, commands.Generate)]
    world.queue = [e for e in world.queue if not isinstance(e[2], events.TokensStreamed)]
    world.workers[again.slot].running.clear()
    assert (again.max_new_tokens, again.context_tokens) == (40, attempt.context_tokens + 60)
    assert again.attempt != attempt.attempt
    (third,) = [c for c in stream(world, again, 30, "abort") if isinstance(c, commands.Generate)]
    world.queue = [e for e in world.queue if not isinstance(e[2], events.TokensStreamed)]
    assert third.max_new_tokens == 10
    (step,) = [c for c in stream(world, third, 10, "length") if isinstance(c, commands.StepEpisode)]
    assert step.truncated
    assert world.core._state.rollout.trajectories[step.trajectory].generated_tokens == 100


def test_the_oldest_cohort_is_dispatched_first() -> None:
    config = make_config(num_workers=1, max_requests_per_worker=2, max_in_flight=64, staleness_bound=2)
    world = World(config, seed=7)
    world.start()
    waited = 0
    while world.finish is None:
        world.step()
        ready = [t for t in world.core._state.rollout.trajectories.values() if t.phase == "ready"]
        for command in world.entries[-1][2]:
            if isinstance(command, commands.Generate):
                cohort = -1 if command.greedy else command.trajectory // 8
                assert all(trajectory.cohort >= cohort for trajectory in ready)
                waited += any(trajectory.cohort > cohort for trajectory in ready)
    assert waited > 10, "younger cohorts had to wait"


@pytest.mark.scenario("EN-05")
def test_an_environment_that_never_works_ends_the_run_with_its_reason() -> None:
    world = World(make_config(), seed=8, can_restore=False)
    world.env_failure_rate = 1.0
    finish = world.run()
    assert finish.exit_code == 1
    assert "each of the 6 evaluation tasks failed" in finish.error
    assert "disk full" in finish.error
    assert len(world.notes) == 2, "the first and the tenth"
    assert "disk full" in world.notes[0]


@pytest.mark.scenario("EN-05")
def test_a_first_step_without_any_sample_ends_the_run() -> None:
    config = make_config()
    environment = msgspec.structs.replace(config.environment, num_evaluation_tasks=0)
    world = World(msgspec.structs.replace(config, environment=environment), seed=9, can_restore=False)
    world.env_failure_rate = 1.0
    finish = world.run()
    assert finish.exit_code == 1
    assert "every trajectory of the first step failed" in finish.error
    assert not world.trained


def test_a_gap_over_its_bound_ends_the_run_after_the_first_step() -> None:
    world = World(make_config())
    world.logprob_gap = 14.3
    finish = world.run()
    assert finish.exit_code == 1
    assert "step 3: rollout and training do not compute the same model" in finish.error, (
        "10 tokens a step, 32 needed"
    )
    assert len(world.trained) == 4


def test_an_update_that_changes_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.testing.world.checksum", lambda version: f"sum-{min(version.step, 2)}")
    world = World(make_config())
    assert world.run().exit_code == 0
    steps = [report.weights_changed for report in world.reports if isinstance(report, StepReport)]
    assert steps == [True, True, False, False, False]
    assert world.notes[0].startswith("step 2 changed no weight: version 0:3 is version 0:2 again")


class SlowWorld(World):
    """Every fifth trajectory's environment answers its steps after a minute only."""

    def step(self) -> bool:
        before = self.core.snapshot()
        self.core.next_wakeup()
        assert self.core.snapshot() == before  # asking changes nothing, or a replay would differ
        return super().step()

    def _step(self, command: commands.StepEpisode) -> None:
        if command.trajectory % 5:
            super()._step(command)
        else:
            self.post(events.EpisodeStepped(command.op, command.trajectory, 0, 1.0, True, 60.0), 60.0)


def test_a_step_is_given_up_at_its_trajectorys_deadline_and_its_place_is_free_at_once() -> None:
    config = Config(
        run=RunConfig(num_steps=3),
        data=DataConfig(batch_size=10, group_size=5),
        environment=EnvironmentConfig(num_evaluation_tasks=0),
        rollout=RolloutConfig(trajectory_deadline_s=5.0, turn_deadline_s=5.0, staleness_bound=0),
    )
    world = SlowWorld(config, seed=3)
    finish = world.run()
    assert finish.exit_code == 0
    late = [record for record in world.records if record.trajectory % 5 == 0]
    assert {record.outcome for record in late} == {"expired"}
    assert finish.summary["expired_trajectories"] == len(late) == 6
    stepped: dict[int, float] = {}
    for at, _, done in world.entries:
        for command in done:
            if isinstance(command, commands.StepEpisode):
                stepped[command.trajectory] = at
            elif isinstance(command, commands.CloseEpisode) and command.trajectory % 5 == 0:
                assert at - stepped[command.trajectory] <= 5.0
    assert world.now < 60.0


def test_a_deadline_that_passes_while_the_coordinator_is_down_ends_the_step_after_it() -> None:
    config = Config(
        run=RunConfig(num_steps=2),
        data=DataConfig(batch_size=10, group_size=5),
        environment=EnvironmentConfig(num_evaluation_tasks=0),
        rollout=RolloutConfig(trajectory_deadline_s=5.0, turn_deadline_s=5.0, staleness_bound=0),
    )
    world = SlowWorld(config, seed=3)
    world.start()
    while not any(
        t.phase == "stepping" and t.id % 5 == 0 for t in world.core._state.rollout.trajectories.values()
    ):
        world.step()
    world.now += 30.0
    world.crash()
    assert world.run().exit_code == 0
    assert world.now < 60.0


class ForgetfulWorld(World):
    """Environments that cannot be brought back to where they were: a replay observes something else."""

    def _open(self, command: commands.OpenEpisode) -> None:
        if command.turns:
            self.post(
                events.EpisodeFailed(command.op, command.trajectory, "mismatch", "observed something else")
            )
        else:
            super()._open(command)


@pytest.mark.parametrize("seed", range(5))
def test_deaths_of_the_coordinator_are_no_failures_of_what_it_ran(seed: int) -> None:
    config = Config(
        run=RunConfig(num_steps=2),
        data=DataConfig(batch_size=8, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=6, max_failures=0),
        rollout=RolloutConfig(num_workers=2, max_requests_per_worker=4),
    )
    world = ForgetfulWorld(config, seed=seed, can_restore=False)
    world.start()
    num_crashes = 0
    for crash in range(8):
        for _ in range(20 + 7 * crash):
            if world.finish is None:
                world.step()
        if world.finish is None:
            world.crash()
            num_crashes += 1
    finish = world.run()
    assert num_crashes >= 4
    assert finish.exit_code == 0, finish.error
    assert finish.summary["environment_failures"] == 0
    assert not [record for record in world.records if record.outcome == "infrastructure"]


@pytest.mark.parametrize("can_restore", [True, False])
def test_a_neighbour_of_a_killer_is_not_charged(can_restore: bool) -> None:
    config = make_config()
    config = msgspec.structs.replace(
        config, environment=EnvironmentConfig(num_evaluation_tasks=0, max_failures=0)
    )
    world = (World if can_restore else ForgetfulWorld)(config, seed=4, can_restore=can_restore)
    world.start()
    charged: set[int] = set()
    deaths = 0
    while world.finish is None and world.step():
        _, _, done = world.entries[-1]
        stepping = [command for command in done if isinstance(command, commands.StepEpisode)]
        if stepping and deaths < 20:
            command, deaths = stepping[0], deaths + 1
            is_charged = deaths == 10
            world.queue = [entry for entry in world.queue if getattr(entry[2], "op", None) != command.op]
            heapq.heapify(world.queue)
            world.envs.discard(command.trajectory)
            world.tokens[command.trajectory] = world.core._state.rollout.trajectories[
                command.trajectory
            ].tokens
            failed = events.EpisodeFailed(command.op, command.trajectory, "gone", "killed", is_charged)
            world.post(failed)
            if is_charged:
                charged.add(command.trajectory)
    assert deaths == 20
    assert {r.trajectory for r in world.records if r.outcome == "infrastructure"} == charged
