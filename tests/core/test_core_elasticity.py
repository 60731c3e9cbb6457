"""Both kinds of elasticity on the virtual clock: who joins, who leaves, what is lent, and what nobody may notice."""

from collections.abc import Callable
from typing import Any

import pytest

from pearl.service.replay import encode_commands, encode_event
from pearl.testing.world import World
from pearl.types import commands, events
from pearl.types.config import (
    Config,
    DataConfig,
    ElasticConfig,
    EnvironmentConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from pearl.types.ids import GpuId, Slot
from pearl.types.reports import GpusReport
from pearl.types.worker_table import WorkerRow

BATCH = 16  # large enough for a step to outlast a start and a hand-over


def make_world(
    seed: int = 0, num_steps: int = 12, start: Any = "early", router: Any = "cache-aware", **elastic: Any
) -> World:
    config = Config(
        run=RunConfig(num_steps=num_steps),
        data=DataConfig(batch_size=BATCH, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=0),
        rollout=RolloutConfig(num_workers=2, max_requests_per_worker=3, start=start, router=router),
        training=TrainingConfig(num_ranks=2),
        elastic=ElasticConfig(**{"inter": True, "preemptible_gpus": 3, **elastic}),
    )
    world = World(config, seed=seed)
    world.token_s = 0.2
    world.start()
    return world


def local(*indices: int) -> tuple[GpuId, ...]:
    return tuple(GpuId(f"local/{index}") for index in indices)


def rows(world: World) -> dict[int, WorkerRow]:
    return {int(slot): row for slot, row in world.core._state.table.rows.items()}


def go_until(world: World, holds: Callable[[], bool], limit: int = 20_000) -> None:
    for _ in range(limit):
        if holds():
            return
        assert world.step(), world.core.status()
    raise AssertionError(f"not within {limit} events: {world.core.status()}")


def serving(world: World) -> set[int]:
    return {slot for slot, row in rows(world).items() if row.status == "serving"}


def of_kind(world: World, kind: type) -> list[Any]:
    return [command for _, _, done in world.entries for command in done if isinstance(command, kind)]


def assert_clean(world: World) -> dict[str, Any]:
    finish = world.run()
    assert finish.exit_code == 0, finish.error
    summary: dict[str, Any] = dict(finish.summary)
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    assert summary["trajectories_trained"] + summary["trajectories_masked"] == summary["steps"] * BATCH
    return summary


# joining


def test_joiners_serve_and_the_survivors_notice_nothing() -> None:
    world = make_world()
    go_until(world, lambda: serving(world) == {0, 1})
    before = {slot: rows(world)[slot] for slot in (0, 1)}
    lifecycle = {slot: (row.incarnation, row.pid, row.gpus) for slot, row in before.items()}
    world.feed(events.GpusArrived(local(4, 5, 6)))
    go_until(world, lambda: serving(world) >= {2, 3, 4})
    for slot, row in before.items():
        assert rows(world)[slot] is row
        assert (row.incarnation, row.pid, row.gpus) == lifecycle[slot]
    summary = assert_clean(world)
    assert summary["arrivals"] == 3
    assert summary["expansions"] == 1
    assert summary["workers_lost"] == 0


@pytest.mark.scenario("MB-08")
def test_an_expansion_whose_third_fails_was_never_there() -> None:
    world = make_world()
    go_until(world, lambda: serving(world) == {0, 1})
    world.feed(events.GpusArrived(local(4, 5, 6)))
    first = len(world.entries)
    go_until(world, lambda: sum(rows(world)[slot].status == "verified" for slot in (2, 3, 4)) == 2)
    late = next(slot for slot in (2, 3, 4) if rows(world)[slot].status != "verified")
    world.lose_worker(Slot(late))
    go_until(world, lambda: world.core._state.counters.expansions_cancelled == 1)
    sent = [c.slot for _, _, done in world.entries[first:] for c in done if isinstance(c, commands.Generate)]
    assert set(sent) <= {0, 1}, "no joiner of a cancelled expansion is ever routed to"
    stopped = {c.slot for c in of_kind(world, commands.StopWorker)}
    assert stopped == {2, 3, 4} - {late}
    go_until(world, lambda: serving(world) >= {2, 3, 4})  # they try again
    assert_clean(world)


def test_a_joiner_serves_the_version_of_its_admission_even_when_versions_come_out_meanwhile() -> None:
    world = make_world()
    go_until(world, lambda: serving(world) == {0, 1})
    world.feed(events.GpusArrived(local(4, 5)))
    go_until(world, lambda: rows(world)[2].status == "verified" or rows(world)[3].status == "verified")
    step = world.core._state.trainer.step
    ready = rows(world)[2]
    go_until(world, lambda: ready.status == "serving")
    published = world.core._state.published
    assert published is not None
    assert ready.version == published.version
    assert published.version.step >= step
    assert_clean(world)


def test_arrivals_are_not_used_when_the_policy_says_so() -> None:
    world = make_world(inter=False)
    world.feed(events.GpusArrived(local(4)))
    summary = assert_clean(world)
    assert summary["arrivals"] == 0
    assert any("elastic.inter = false" in note for note in world.notes)


def test_a_gpu_on_which_every_joiner_dies_is_left_alone_and_the_run_goes_on() -> None:
    world = make_world(num_steps=60)
    go_until(world, lambda: serving(world) == {0, 1})
    world.start_failure_rate = 1.0
    world.feed(events.GpusArrived(local(4)))
    summary = assert_clean(world)
    assert 2 <= summary["expansions_cancelled"] <= world.config.runtime.max_restarts + 1
    assert summary["expansions"] == 0


# leaving


@pytest.mark.parametrize("seed", range(5))
def test_a_planned_reclaim_loses_no_token_and_is_on_time(seed: int) -> None:
    world = make_world(seed)
    world.feed(events.GpusArrived(local(4, 5)))
    go_until(world, lambda: rows(world)[2].running > 0)
    world.feed(events.GpusReclaimed(local(4), 5.0, "wanted back"))
    assert rows(world)[2].status == "leaving"
    go_until(world, lambda: bool(world.returned))
    assert world.returned[0].gpus == local(4)
    assert [r.on_time for r in world.reports if isinstance(r, GpusReport) and r.event == "returned"] == [True]
    summary = assert_clean(world)
    assert summary["reclaims"] == 1
    assert summary["tokens_lost"] == summary["tokens_lost_planned"] == summary["workers_lost"] == 0
    assert summary["interrupted_trajectories"] > 0


def test_a_reclaim_of_a_joiner_cancels_the_whole_expansion() -> None:
    world = make_world()
    go_until(world, lambda: serving(world) == {0, 1})
    world.feed(events.GpusArrived(local(4, 5)))
    world.feed(events.GpusReclaimed(local(5), 5.0, "wanted back"))
    assert world.core._state.elastic.cluster.expansion is None
    go_until(world, lambda: bool(world.returned))
    go_until(world, lambda: 2 in serving(world))
    assert rows(world)[3].status == "gone"
    assert_clean(world)


def test_a_freed_slot_is_used_again_under_a_new_incarnation() -> None:
    world = make_world(num_steps=20)
    world.feed(events.GpusArrived((GpuId("far/0"),)))
    go_until(world, lambda: 2 in serving(world))
    world.lose_host("far")
    go_until(world, lambda: rows(world)[2].status == "gone")
    world.feed(events.GpusArrived((GpuId("near/0"),)))
    go_until(world, lambda: 2 in serving(world))
    assert rows(world)[2].gpus == (GpuId("near/0"),)
    assert rows(world)[2].incarnation >= 2
    assert len(rows(world)) == 3
    assert_clean(world)


def gpu_events(world: World) -> list[tuple[str, str]]:
    return [(report.event, report.gpus) for report in world.reports if isinstance(report, GpusReport)]


def test_a_host_that_comes_again_before_its_workers_are_known_to_be_lost_is_used_again() -> None:
    world = make_world(num_steps=20)
    far = (GpuId("far/0"),)
    world.feed(events.GpusArrived(far))
    go_until(world, lambda: 2 in serving(world))
    world.feed(events.HostLost("far", "another agent has joined for it"))
    world.feed(events.GpusArrived(far))
    world.lose_worker(Slot(2))
    go_until(world, lambda: rows(world)[2].incarnation == 2 and 2 in serving(world))
    assert rows(world)[2].gpus == far
    assert gpu_events(world) == [("arrived", "far/0"), ("lost", "far/0"), ("arrived", "far/0")]
    assert not world.returned, "there is nobody to give them back to"
    assert assert_clean(world)["arrivals"] == 2


def test_gpus_that_arrive_again_while_they_are_given_back_are_used_again() -> None:
    world = make_world(num_steps=20)
    world.feed(events.GpusArrived(local(4)))
    go_until(world, lambda: rows(world).get(2) is not None and rows(world)[2].running > 0)
    world.feed(events.GpusReclaimed(local(4), 5.0, "wanted back"))
    world.feed(events.GpusArrived(local(4)))
    assert rows(world)[2].status == "leaving", "they are given back all the same"
    go_until(world, lambda: bool(world.returned))
    go_until(world, lambda: 2 in serving(world))
    kinds = [event for event, _ in gpu_events(world)]
    assert kinds == ["arrived", "reclaimed", "returned", "arrived"]
    assert_clean(world)


@pytest.mark.scenario("MB-06")
def test_all_workers_gone_at_once_and_the_run_goes_on_when_one_returns() -> None:
    world = make_world()
    go_until(world, lambda: serving(world) == {0, 1})
    for slot in (0, 1):
        world.lose_worker(Slot(slot))
    go_until(world, lambda: not serving(world))
    assert world.core.status()["in_flight"] == BATCH
    assert_clean(world)


def test_tensor_parallel_workers_need_all_their_gpus_on_one_host() -> None:
    config = Config(
        run=RunConfig(num_steps=6),
        data=DataConfig(batch_size=BATCH, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=0),
        rollout=RolloutConfig(num_workers=1, gpus_per_worker=2),
        elastic=ElasticConfig(inter=True),
    )
    world = World(config)
    world.token_s = 0.2
    world.start()
    world.feed(events.GpusArrived((GpuId("a/0"), GpuId("a/1"), GpuId("a/2"), GpuId("b/0"))))
    go_until(world, lambda: 1 in serving(world))
    assert len(rows(world)) == 2, "a/2 and b/0 wait unbound"
    world.feed(events.GpusReclaimed((GpuId("a/0"),), 5.0, "wanted back"))
    go_until(world, lambda: len(rows(world)) == 3 and 2 in serving(world))
    assert set(rows(world)[2].gpus) == {GpuId("a/1"), GpuId("a/2")}
    assert_clean(world)


# lending


@pytest.mark.parametrize("seed", range(5))
def test_training_gpus_are_lent_and_returned(seed: int) -> None:
    """The world asserts that memory has one owner, and that nothing is sent to a worker without it."""
    world = make_world(seed, borrow="always")
    summary = assert_clean(world)
    assert summary["borrows"] >= 4
    assert summary["returns"] == summary["borrows"]
    assert summary["activation_seconds_mean"] > 0
    assert summary["deactivation_seconds_mean"] > 0
    overlap = [row for row in rows(world).values() if row.zone == "overlap"]
    assert [row.gpus for row in overlap] == [local(0), local(1)]
    assert all(row.incarnation == 1 for row in overlap), "their processes live on"
    generated_there = [c for c in of_kind(world, commands.Generate) if rows(world)[c.slot].zone == "overlap"]
    assert generated_there


def test_nothing_runs_on_a_gpu_after_it_is_returned() -> None:
    world = make_world(borrow="always")
    go_until(world, lambda: len(of_kind(world, commands.RestoreTraining)) == 2)
    overlap = [row for row in rows(world).values() if row.zone == "overlap"]
    assert [row.status for row in overlap] == ["asleep", "asleep"]
    assert [row.running for row in overlap] == [0, 0]


@pytest.mark.scenario("MH-02")
def test_a_worker_that_does_not_let_go_is_killed_and_the_return_happens() -> None:
    world = make_world(borrow="always")
    go_until(world, lambda: bool(serving(world) & {2, 3}))
    world.stuck_rate = 1.0
    go_until(world, lambda: bool(of_kind(world, commands.RestoreTraining)))
    world.stuck_rate = 0.0
    summary = assert_clean(world)
    assert summary["workers_lost"] == 2
    assert summary["returns"] == summary["borrows"] >= 2, "started again in the next window"


def test_a_batch_that_completes_while_state_moves_turns_back_at_once() -> None:
    world = make_world(borrow="always")
    go_until(world, lambda: world.core._state.elastic.toggle.phase == "offloading")
    world.lose_trainer()
    go_until(world, lambda: world.core._state.trainer.status == "idle")
    summary = assert_clean(world)
    assert summary["trainers_lost"] == 1


def test_an_overlap_worker_that_dies_asleep_is_started_again_in_the_next_window() -> None:
    world = make_world(borrow="always")
    go_until(world, lambda: rows(world)[2].status == "asleep" and world.core._state.trainer.step == 1)
    world.lose_worker(Slot(2))
    go_until(world, lambda: rows(world)[2].status == "gone")
    go_until(world, lambda: 2 in serving(world))
    assert rows(world)[2].incarnation >= 2
    assert_clean(world)


@pytest.mark.scenario("WS-12")
def test_a_version_that_its_source_has_no_more_is_not_asked_for_again() -> None:
    """A trainer has its next version before we hear of it: workers that come late must not be worn out meanwhile."""
    world = make_world()
    go_until(world, lambda: serving(world) == {0, 1})
    go_until(world, lambda: rows(world)[0].status == "updating")
    row = rows(world)[0]
    version = row.target
    for _ in range(5):
        late = events.WeightsFailed(row.op, row.slot, row.incarnation, "superseded", superseded=True)
        world.feed(late)
        assert (row.status, row.op, row.target) == ("updating", 0, version)
    go_until(world, lambda: row.status == "serving")
    assert row.version is not None
    assert version is not None
    assert row.version.step == version.step + 1
    again = [c for c in of_kind(world, commands.UpdateWeights) if (c.slot, c.version) == (row.slot, version)]
    assert len(again) == 1
    assert assert_clean(world)["workers_lost"] == 0


def test_an_overlap_worker_that_starts_slower_than_windows_last_is_waited_for_once() -> None:
    """Else every window would start and kill it for ever."""
    world = make_world(num_steps=24, borrow="always")
    go_until(world, lambda: 2 in serving(world))
    world.slow_start_s = 60.0
    world.lose_worker(Slot(2))
    go_until(world, lambda: rows(world)[2].status == "asleep")
    assert rows(world)[2].incarnation == 3, "one start was cut short, the next one was not"
    go_until(world, lambda: 2 in serving(world))
    summary = assert_clean(world)
    assert summary["workers_lost"] == 1
    assert rows(world)[2].incarnation == 3
    assert world.core._state.elastic.toggle.aborted_starts == []


def test_a_resume_starts_with_what_the_own_host_has() -> None:
    world = make_world(num_steps=12, borrow="always")
    world.feed(events.GpusArrived((*local(4), GpuId("far/0"))))
    go_until(world, lambda: serving(world) >= {4, 5})
    world.crash()
    present = {row.gpu for row in world.core._state.elastic.gpu_table.rows.values() if row.present}
    assert GpuId("far/0") not in present
    assert set(local(4)) <= present
    assert_clean(world)


# the record


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_and_events_give_the_same_journal(seed: int) -> None:
    def journal() -> list[tuple[float, bytes, bytes]]:
        world = make_world(seed, borrow="always")
        world.feed(events.GpusArrived(local(4, 5, 6)))
        go_until(world, lambda: len(serving(world)) >= 4)
        world.feed(events.GpusReclaimed(local(5), 1.0, "wanted back"))
        world.run()
        return [(now, encode_event(event), encode_commands(done)) for now, event, done in world.entries]

    assert journal() == journal()


def test_a_notice_returns_at_once_what_is_not_there() -> None:
    world = make_world(num_steps=20)
    there, absent = GpuId("far/0"), GpuId("far/1")
    world.feed(events.GpusArrived((there,)))
    done = world.feed(events.GpusReclaimed((there, absent), 30.0, "host far: spot"))
    assert commands.ReturnGpus((absent,), 0.0) in done


def test_a_request_is_answered_and_carried_out_in_one_step() -> None:
    world = make_world(num_steps=20)
    arrive = events.PreemptRequested(7, "arrive", (), 2, 30.0, ("local",))
    done = world.feed(arrive)
    assert done[0] == commands.AnswerPreempt(7, local(4, 5))
    assert gpu_events(world)[-1] == ("arrived", "local/4,local/5")
    done = world.feed(events.PreemptRequested(8, "reclaim", (), 1, 5.0, reason="the trace"))
    assert done[0] == commands.AnswerPreempt(8, local(5))
    done = world.feed(events.PreemptRequested(9, "reclaim", local(0), 0, 5.0))
    assert [type(command) for command in done] == [commands.AnswerPreempt]
    assert world.answers[-1].error.startswith("local/0 is not preemptible")
    assert_clean(world)
