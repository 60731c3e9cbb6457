"""Conversations with the core: faults on a virtual clock, and what must hold after them."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from pearl.core.coordinator import Coordinator
from pearl.testing.world import World, checksum
from pearl.types import commands, events
from pearl.types.config import Config, DataConfig, EnvironmentConfig, RolloutConfig, RunConfig, TrainingConfig
from pearl.types.ids import Incarnation, Slot
from pearl.types.reports import StepReport
from pearl.types.weights import Version


def make_config(**rollout: Any) -> Config:
    settings: dict[str, Any] = {"max_requests_per_worker": 4, "num_workers": 2, **rollout}
    return Config(
        run=RunConfig(num_steps=5),
        data=DataConfig(batch_size=8, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=6),
        rollout=RolloutConfig(**settings),
    )


def training_records(world: World) -> list[Any]:
    return [r for r in world.records if r.evaluation is None]


def assert_clean(world: World, steps: int) -> None:
    """Every prompt of every step trained by exactly its members, once in the surviving lineage."""
    assert world.finish is not None
    summary = world.finish.summary
    assert summary["complete"]
    assert summary["steps"] == steps
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    restores = {r[0]: r[1] for r in summary["lineages"]}  # type: ignore[union-attr]
    alive = [
        r
        for r in training_records(world)
        if r.trained_step is not None
        and all(r.trained_step < step for lineage, step in restores.items() if lineage > r.lineage)
    ]
    batch = world.config.data.batch_size
    assert Counter(r.trajectory for r in alive) == Counter(range(steps * batch))
    assert all(r.trained_step == r.cohort for r in alive)
    unmasked = [r for r in alive if r.outcome not in ("expired", "infrastructure")]
    generated = sum(t.generated_tokens for r in unmasked for t in r.turns)
    assert summary["tokens_trained"] == generated
    everything = training_records(world)
    retrained = [r for r in everything if r.trained_step is not None and r not in alive]
    total = sum(t.generated_tokens for r in everything for t in r.turns)
    twice = sum(t.generated_tokens for r in retrained for t in r.turns)
    assert summary["tokens_generated"] <= total <= summary["tokens_generated"] + twice


@pytest.mark.parametrize("start", ["early", "strict"])
@pytest.mark.parametrize("router", ["sticky", "least-loaded", "cache-aware"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_run_to_the_end(start: str, router: str, bound: int) -> None:
    world = World(make_config(start=start, router=router, staleness_bound=bound))
    world.run()
    assert_clean(world, 5)
    assert world.finish is not None
    assert world.finish.summary["max_staleness"] <= bound  # type: ignore[operator]


def test_same_events_give_the_same_commands() -> None:
    """Replay: a fresh core fed the journal gives the journalled commands, from the start and from a snapshot."""
    world = World(make_config(), seed=3)
    world.start()
    for _ in range(60):
        world.step()
    snapshot, position = world.core.snapshot(), len(world.entries)
    world.run()
    fresh = Coordinator(world.config)
    for now, event, expected in world.entries:
        assert fresh.handle(event, now) == expected
    restored = Coordinator.restore(world.config, snapshot)
    assert restored.snapshot() == snapshot
    for now, event, expected in world.entries[position:]:
        assert restored.handle(event, now) == expected


def test_strict_start_waits_for_the_cohort_before() -> None:
    world = World(make_config(start="strict", staleness_bound=1, max_in_flight=64))
    world.start()
    opened = 0
    while world.finish is None:
        world.step()
        for command in world.entries[-1][2]:
            if isinstance(command, commands.OpenEpisode) and not command.evaluation:
                cohorts = world.core._state.rollout.buffer.cohorts
                before = cohorts.get(command.trajectory // 8 - 1)  # forgotten once a checkpoint holds it
                assert before is None or before.is_complete
                opened += 1
    assert opened == 40


def test_killed_workers_cost_only_unstreamed_tokens() -> None:
    world = World(make_config(), seed=1)
    world.start()
    for i in range(1, 6):
        for _ in range(70):
            world.step()
        if world.finish is None:
            world.lose_worker(Slot(i % 2))
    world.run()
    assert_clean(world, 5)
    assert world.finish is not None
    assert world.finish.summary["workers_lost"] >= 1  # type: ignore[operator]
    lost = world.finish.summary["tokens_lost"]
    assert isinstance(lost, int)
    assert lost >= 0
    assert world.finish.summary["tokens_discarded"] == 0


@pytest.mark.scenario("MB-06")
def test_all_workers_gone_requests_wait_with_their_tokens() -> None:
    world = World(make_config(), seed=2)
    world.start()
    for _ in range(80):
        world.step()
    kept = {i: t.generated_tokens for i, t in world.core._state.rollout.trajectories.items()}
    for slot in list(world.workers):
        world.lose_worker(slot)
    world.run()
    assert_clean(world, 5)
    for record in training_records(world):
        if record.trajectory in kept:
            assert sum(t.generated_tokens for t in record.turns) >= kept[record.trajectory]


@pytest.mark.scenario("MB-01")
def test_slots_are_never_renumbered() -> None:
    world = World(make_config(num_workers=4), seed=2)
    world.start()
    for _ in range(60):
        world.step()
    before = {r.slot: (r.gpus, r.incarnation) for r in world.core._state.table.rows.values()}
    world.lose_worker(Slot(1))
    world.lose_worker(Slot(0))
    for _ in range(200):
        world.step()
    after = {r.slot: (r.gpus, r.incarnation) for r in world.core._state.table.rows.values()}
    assert after[Slot(2)] == before[Slot(2)]
    assert after[Slot(3)] == before[Slot(3)]
    for slot in (Slot(0), Slot(1)):
        assert after[slot] == (before[slot][0], before[slot][1] + 1)


def test_status_says_how_far_the_batch_is() -> None:
    world = World(make_config(), seed=4)
    world.start()
    seen = []
    while world.finish is None:
        world.step()
        seen.append(world.core.status())
    first = [status for status in seen if status["step"] == 0 and status["num_steps"]]
    size = world.config.data.batch_size
    assert {status["finished"] for status in first} == set(range(size + 1)), "it goes up one by one"
    assert {(status["batch_size"], status["reward_mean"], status["step_seconds"]) for status in first} == {
        (size, None, None)
    }
    summary = world.finish.summary
    assert (seen[-1]["step"], seen[-1]["num_steps"]) == (summary["steps"], world.config.run.num_steps)
    assert seen[-1]["reward_mean"] == summary["reward_last"]
    steps = [report for report in world.reports if isinstance(report, StepReport)]
    assert seen[-1]["step_seconds"] == steps[-1].seconds


def test_trainer_death_restarts_only_the_training_world() -> None:
    world = World(make_config(), seed=4)
    world.start()
    losses = 0
    for _ in range(100_000):
        if world.finish is not None:
            break
        world.step()
        if (
            losses < 3
            and world.trainer
            and world.core._state.trainer.status == "training"
            and world.rng.random() < 0.1
        ):
            world.lose_trainer()
            losses += 1
    assert losses == 3
    assert_clean(world, 5)
    assert world.finish is not None
    assert world.finish.summary["trainers_lost"] == 3
    assert world.finish.summary["workers_lost"] == 0
    assert not any(isinstance(c, commands.StartWorker) for _, _, done in world.entries[1:] for c in done)


def test_restore_to_an_older_checkpoint_discards_dead_updates() -> None:
    config = msgspec.structs.replace(
        make_config(staleness_bound=1), training=TrainingConfig(checkpoint_every=3)
    )
    world = World(config, seed=5)
    world.start()
    while world.core._state.trainer.step < 2:
        world.step()
    world.lose_trainer()
    world.run()
    assert_clean(world, 5)
    assert world.finish is not None
    assert world.finish.summary["updates_discarded"] == 2
    assert world.finish.summary["lineages"] == [[0, 0], [1, 0]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.scenario("CK-01")
def test_resume_after_a_crash_anywhere(seed: int, bound: int) -> None:
    """Each prompt trained exactly once, with crashes at random events."""
    world = World(make_config(staleness_bound=bound), seed=seed)
    world.start()
    for _ in range(3):
        for _ in range(world.rng.randint(1, 220)):
            if world.finish is None:
                world.step()
        if world.finish is None:
            world.crash()
    world.run()
    assert_clean(world, 5)


def test_stop_by_signal_and_resume() -> None:
    world = World(make_config(), seed=6)
    world.start()
    for _ in range(150):
        world.step()
    (finish,) = [c for c in world.feed(events.StopRequested(2)) if isinstance(c, commands.Finish)]
    assert finish.exit_code == 130
    assert world.core.finished
    world.finish = None
    world.crash()
    world.run()
    assert_clean(world, 5)


@pytest.mark.scenario("WS-06")
def test_nothing_runs_before_the_proof_matches() -> None:
    world = World(make_config(num_workers=1), seed=1)
    world.start()
    row = world.core._state.table.rows[Slot(0)]
    while row.status != "updating":
        world.step()
    world.queue = [e for e in world.queue if not isinstance(e[2], events.WeightsVerified)]
    target = row.target
    assert target is not None
    wrong = events.WeightsVerified(row.op, Slot(0), row.incarnation, target, "other", 0.1)
    done = world.feed(wrong)
    assert not any(isinstance(c, commands.Generate) for c in done)
    assert row.status == "updating", "a failed proof is taken again"
    world.run()
    assert_clean(world, 5)


@pytest.mark.scenario("WS-05")
def test_a_worker_that_refuses_weights_is_replaced_and_healed() -> None:
    world = World(make_config(), seed=7)
    world.update_failure_rate = 0.4
    world.run()
    assert_clean(world, 5)


@pytest.mark.scenario("HT-04")
def test_a_worker_that_fails_fast_is_taken_out() -> None:
    world = World(make_config(), seed=8)
    world.attempt_error_rate = 0.15
    world.run(400_000)
    assert world.finish is not None
    assert world.finish.exit_code in (0, 1)
    assert world.finish.summary["failed_attempts"] > 0  # type: ignore[operator]


@pytest.mark.scenario("EN-05")
def test_infrastructure_failures_are_masked_not_rewarded() -> None:
    world = World(make_config(), seed=9, can_restore=False)
    world.env_failure_rate = 0.3
    world.run()
    assert_clean(world, 5)
    masked = {
        r.trajectory for r in training_records(world) if r.outcome == "infrastructure" and not r.discarded
    }
    assert masked
    for _, _, done in world.entries:
        for command in done:
            if isinstance(command, commands.Train):
                assert {s.trajectory for s in command.samples if s.masked} <= masked


def test_environments_that_die_are_replayed() -> None:
    world = World(make_config(), seed=10)
    world.start()
    for _ in range(4):
        for _ in range(60):
            world.step()
        world.lose_environments()
    world.run()
    assert_clean(world, 5)
    replays = [
        c for _, _, done in world.entries for c in done if isinstance(c, commands.OpenEpisode) and c.turns
    ]
    assert replays


@pytest.mark.scenario("ST-05")
def test_a_stuck_attempt_expires_and_frees_its_place() -> None:
    world = World(make_config(turn_deadline_s=5.0), seed=11)
    world.start()
    while not world.attempts:
        world.step()
    attempt, (slot, trajectory) = next(iter(world.attempts.items()))
    world.queue = [
        e
        for e in world.queue
        if not (isinstance(e[2], events.TokensStreamed) and e[2].deltas[0].attempt == attempt)
    ]
    del world.attempts[attempt]
    aborted = False
    for _ in range(100_000):
        if world.finish is not None:
            break
        world.step()
        for command in world.entries[-1][2]:
            if isinstance(command, commands.Abort) and command.attempt == attempt:
                aborted = True
                world.lose_worker(slot)  # it does not answer the abort: liveness ends the worker
    assert aborted
    assert_clean(world, 5)
    assert world.finish is not None
    assert world.finish.summary["expired_trajectories"] == 1
    assert [r.outcome for r in world.records if r.trajectory == trajectory] == ["expired"]


@pytest.mark.scenario("ST-07")
def test_the_data_ends_before_the_steps() -> None:
    world = World(make_config(), seed=12, num_train_tasks=5)
    world.run()
    assert world.finish is not None
    assert world.finish.summary["steps"] == 3
    assert world.notes == ["the data ends after 3 steps (5 prompts), before run.num_steps = 5"]
    assert Counter(r.prompt for r in training_records(world)) == dict.fromkeys(range(5), 4)


@pytest.mark.scenario("ST-01")
def test_staleness_is_counted_once() -> None:
    world = World(make_config(staleness_bound=1), seed=13)
    world.run()
    for record in training_records(world):
        assert record.trained_step is not None
        assert record.start_version is not None
        assert 0 <= record.trained_step - record.start_version.step <= 1
        assert record.end_version is not None
        assert record.end_version >= record.start_version


@pytest.mark.scenario("PR-05")
def test_partial_rollout_off_never_mixes_versions() -> None:
    world = World(make_config(partial_rollout=False, staleness_bound=1), seed=14)
    world.run()
    assert_clean(world, 5)
    for record in training_records(world):
        if not record.discarded:
            assert len({run.version for turn in record.turns for run in turn.versions}) <= 1
    assert any(r.discarded for r in training_records(world))


@pytest.mark.scenario("PR-05")
def test_partial_rollout_on_records_each_version() -> None:
    world = World(make_config(staleness_bound=2), seed=14)
    world.run()
    assert any(
        len({run.version for turn in r.turns for run in turn.versions}) > 1 for r in training_records(world)
    )
    for record in training_records(world):
        for turn in record.turns:
            assert sum(run.count for run in turn.versions) == turn.generated_tokens


def test_late_answers_are_dropped_and_counted() -> None:
    world = World(make_config(), seed=15)
    world.start()
    for _ in range(50):
        world.step()
    before = world.core._state.counters.stale_events
    version = Version(0, 0)
    late: list[events.AnyEvent] = [
        events.WorkerReady(1, Slot(0), Incarnation(9), "host", 1),  # type: ignore[arg-type]
        events.WeightsVerified(1, Slot(0), Incarnation(1), version, checksum(version), 0.1),  # type: ignore[arg-type]
        events.WorkerLost(Slot(1), Incarnation(7), "old"),
        events.TrainerLost(Incarnation(0), "old"),
        events.TokensStreamed(Slot(0), Incarnation(9), ()),
    ]
    for event in late:
        assert world.feed(event) == []
    assert world.core._state.counters.stale_events == before + len(late)


def test_a_worker_that_can_never_start_ends_the_run_at_once() -> None:
    world = World(make_config(), seed=16)
    world.start()
    incarnation = world.workers[Slot(0)].incarnation
    world.feed(events.WorkerLost(Slot(0), incarnation, "lacks 3 of the model's weights", is_final=True))
    assert world.finish is not None
    assert world.finish.exit_code == 1
    assert "rollout worker 0 cannot start: lacks 3 of the model's weights" in world.finish.error


def test_a_training_world_that_can_never_start_ends_the_run_at_once() -> None:
    world = World(make_config(), seed=16)
    world.start()
    assert world.trainer is not None
    world.feed(events.TrainerLost(world.trainer, "no demonstration came", is_final=True))
    assert world.finish is not None
    assert world.finish.exit_code == 1
    assert "the training world cannot start: no demonstration came" in world.finish.error


def test_a_worker_that_keeps_dying_ends_the_run_with_a_reason() -> None:
    world = World(make_config(), seed=16)
    world.start()
    for _ in range(50):
        if world.finish is None:
            world.lose_worker(Slot(0), "CUDA error")
            for _ in range(40):
                if world.finish is None:
                    world.step()
    assert world.finish is not None
    assert world.finish.exit_code == 1
    assert "CUDA error" in world.finish.error
    assert "runtime.max_restarts" in world.finish.error


def test_stop_at_reward_ends_early_and_cleanly() -> None:
    config = make_config()
    config = msgspec.structs.replace(config, run=RunConfig(num_steps=5, stop_at_reward=0.0))
    world = World(config, seed=17)
    world.run()
    assert world.finish is not None
    assert world.finish.summary["steps"] == 1
    assert world.finish.summary["complete"]
    assert world.finish.summary["eval_reward"] is not None
