"""Reserved hosts on the virtual clock: the job's own workers run there, and a host's loss is a failure."""

import pytest

from pearl.core.state import fresh_table
from pearl.testing.world import World
from pearl.types import events
from pearl.types.config import (
    Config,
    DataConfig,
    ElasticConfig,
    EnvironmentConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from pearl.types.ids import GpuId

A, B, C = (tuple(GpuId(f"{host}/{index}") for index in (0, 1)) for host in "abc")


def make_world(*, num_workers: int = 4, reserved: int = 4, size: int = 1, seed: int = 0) -> World:
    """The coordinator's host trains; a and b are reserved."""
    config = Config(
        run=RunConfig(num_steps=8),
        data=DataConfig(batch_size=16, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=0),
        rollout=RolloutConfig(
            num_workers=num_workers, gpus_per_worker=size, reserved_gpus=reserved, max_requests_per_worker=3
        ),
        training=TrainingConfig(num_ranks=2),
        elastic=ElasticConfig(inter=True, borrow="never"),
    )
    world = World(config, seed=seed)
    world.token_s = 0.2
    world.started = events.Started(0, 0, True, (*A, *B)[:reserved])
    world.start()
    return world


def serving(world: World) -> dict[int, str]:
    """Return each serving slot with its host."""
    rows = world.core._state.table.rows.items()
    return {int(slot): row.gpus[0].partition("/")[0] for slot, row in rows if row.status == "serving"}


def go_until(world: World, wanted: dict[int, str]) -> None:
    for _ in range(20_000):
        if serving(world) == wanted:
            return
        assert world.step(), world.core.status()
    raise AssertionError(world.core.status())


def finish(world: World) -> dict[str, object]:
    done = world.run()
    assert done.exit_code == 0, done.error
    assert done.summary["prompts_lost"] == done.summary["prompts_trained_twice"] == 0
    return dict(done.summary)


def test_all_rollout_runs_on_reserved_hosts_and_none_counts_as_preemptible() -> None:
    world = make_world()
    go_until(world, {0: "a", 1: "a", 2: "b", 3: "b"})
    pools = {str(gpu["gpu"]): gpu["pool"] for gpu in world.core.status()["gpus"]}  # type: ignore[attr-defined]
    assert pools == {"local/0": "training", "local/1": "training"} | dict.fromkeys((*A, *B), "rollout")
    world.feed(events.GpusReclaimed((*A, *B), 5.0, "not to be had"))
    assert serving(world) == {0: "a", 1: "a", 2: "b", 3: "b"}
    summary = finish(world)
    assert (summary["arrivals"], summary["reclaims"], summary["workers_lost"]) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_the_loss_of_a_reserved_host_is_a_failure_and_its_workers_return_with_it(seed: int) -> None:
    world = make_world(seed=seed)
    go_until(world, {0: "a", 1: "a", 2: "b", 3: "b"})
    world.lose_host("a")
    go_until(world, {2: "b", 3: "b"})
    while any(world.core._state.elastic.gpu_table.rows[gpu].present for gpu in A):
        assert world.step()  # what is heard first, of the host or of its workers, is chance
    world.feed(events.GpusArrived(A, reserved=True))
    go_until(world, {0: "a", 1: "a", 2: "b", 3: "b"})
    summary = finish(world)
    assert summary["arrivals"] == summary["reclaims"] == summary["expansions"] == 0
    assert summary["workers_lost"] >= 2  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(4))
def test_a_host_that_is_back_before_its_loss_is_heard_of_serves_again(seed: int) -> None:
    world = make_world(seed=seed)
    go_until(world, {0: "a", 1: "a", 2: "b", 3: "b"})
    world.feed(events.HostLost("a", "silent"))
    world.feed(events.GpusArrived(A, reserved=True))
    go_until(world, {2: "b", 3: "b"})
    go_until(world, {0: "a", 1: "a", 2: "b", 3: "b"})
    finish(world)


def test_another_reserved_host_takes_the_place_of_one_that_is_lost() -> None:
    world = make_world()
    go_until(world, {0: "a", 1: "a", 2: "b", 3: "b"})
    world.lose_host("b")
    go_until(world, {0: "a", 1: "a"})
    world.feed(events.GpusArrived(C, reserved=True))
    go_until(world, {0: "a", 1: "a", 2: "c", 3: "c"})
    assert world.core.host_pools() == {"a": "rollout", "b": "rollout", "c": "rollout"}
    finish(world)


def test_three_pools_at_once_with_workers_of_two_gpus() -> None:
    world = make_world(num_workers=3, reserved=4, size=2)
    assert serving(world) == {}
    go_until(world, {0: "local", 1: "a", 2: "b"})
    world.feed(events.GpusArrived((GpuId("spot/0"), GpuId("spot/1"), GpuId("spot/2"))))
    go_until(world, {0: "local", 1: "a", 2: "b", 3: "spot"})
    world.lose_host("spot")
    assert finish(world)["arrivals"] == 3


def test_a_resumed_run_takes_the_reserved_hosts_that_are_there_then() -> None:
    world = make_world()
    go_until(world, {0: "a", 1: "a", 2: "b", 3: "b"})
    world.crash((*B, *C))
    go_until(world, {0: "c", 1: "c", 2: "b", 3: "b"})
    finish(world)


def test_the_table_holds_room_for_reserved_workers_before_any_host_is_known() -> None:
    config = Config(
        rollout=RolloutConfig(num_workers=3, reserved_gpus=2), training=TrainingConfig(num_ranks=1)
    )
    workers, gpus = fresh_table(config)
    assert [row.gpus for row in workers.rows.values()] == [("local/1",), ("(awaited)/0",), ("(awaited)/1",)]
    assert not any(row.usable for row in gpus.rows.values() if row.host == "(awaited)")
