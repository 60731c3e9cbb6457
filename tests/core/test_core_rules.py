"""Rules of the core, each as a short conversation on the virtual clock."""

import msgspec
import pytest
from test_core import assert_clean, make_config, training_records
from world import World

from pearl.types import commands, events
from pearl.types.ids import Slot
from pearl.types.reports import StepReport
from pearl.types.trajectory import TokenDelta, VersionRun
from pearl.types.weights import Version


def test_st_04_every_opened_trajectory_is_accounted_for_at_every_event() -> None:
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
def test_ck_03_a_start_never_deadlocks(first: type, last: type) -> None:
    world = World(make_config(), seed=4)
    start_with_delays(world, first, last)
    world.run()
    assert_clean(world, 5)


def test_ck_03_a_resume_with_one_worker_missing_goes_on_at_the_checkpoint() -> None:
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


def test_tk_06_a_turn_is_never_asked_for_more_than_the_context_holds() -> None:
    world = small_world(max_context_tokens=7)  # the first prompt has 5
    attempt = only_attempt(world)
    assert attempt.max_new_tokens == 2
    stream(world, attempt, 2, "length")
    (record,) = [t for t in world.core._state.rollout.trajectories.values() if t.phase == "finished"]
    assert record.outcome == "truncated_context"
    assert not record.outcome.is_masked


def test_tk_06_an_observation_that_leaves_no_room_ends_the_trajectory() -> None:
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


def test_tk_06_a_turn_at_its_own_limit_goes_to_the_environment_as_truncated() -> None:
    world = small_world(max_context_tokens=100)
    attempt = only_attempt(world)
    (step,) = [c for c in stream(world, attempt, 4, "length") if isinstance(c, commands.StepEpisode)]
    assert step.truncated


def test_pr_03_a_resumed_turn_is_asked_for_what_is_left() -> None:
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


def test_en_05_an_environment_that_never_works_ends_the_run_with_its_reason() -> None:
    world = World(make_config(), seed=8, can_restore=False)
    world.env_failure_rate = 1.0
    finish = world.run()
    assert finish.exit_code == 1
    assert "each of the 6 evaluation tasks failed" in finish.error
    assert "disk full" in finish.error
    assert len(world.notes) == 2, "the first and the tenth"
    assert "disk full" in world.notes[0]


def test_en_05_a_first_step_without_any_sample_ends_the_run() -> None:
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
    monkeypatch.setattr("world.checksum", lambda version: f"sum-{min(version.step, 2)}")
    world = World(make_config())
    assert world.run().exit_code == 0
    steps = [report.weights_changed for report in world.reports if isinstance(report, StepReport)]
    assert steps == [True, True, False, False, False]
    assert world.notes[0].startswith("step 2 changed no weight: version 0:3 is version 0:2 again")
