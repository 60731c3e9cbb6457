"""Whole elastic runs, with the real core: hosts come and go, GPUs arrive and are reclaimed, training's are lent."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from whole_run import WholeRun, once, run_whole

from pearl.testing.cluster import Cluster
from pearl.testing.fakes import FakeRollout, small_config
from pearl.types.config import Config, ElasticConfig, RuntimeConfig
from pearl.types.trace import TraceEvent


def elastic_config(**elastic: Any) -> Config:
    runtime = RuntimeConfig(heartbeat_period_s=0.05, heartbeat_timeout_s=1.0, lease_s=5.0)
    settings = {"inter": True} | elastic
    return msgspec.structs.replace(small_config(), runtime=runtime, elastic=ElasticConfig(**settings))


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((run_dir / "summary.json").read_bytes())
    return found


def slowed(cluster: Cluster, limit_s: float = 0.005) -> None:
    """Have environments take their time, so that a run lasts long enough for something to happen in it."""
    answer = cluster.kinds["environment"].handle

    async def late(self: Any, message: Any) -> Any:
        if type(message).__name__ == "StepEpisode":
            await asyncio.sleep(limit_s)
        return await answer(self, message)

    cluster.kinds["environment"] = type("Slow", (cluster.kinds["environment"],), {"handle": late})


async def test_gpus_of_this_host_arrive_and_are_reclaimed_by_a_trace(tmp_path: Path) -> None:
    trace = (
        TraceEvent("arrive", at_step=0, count=2),
        TraceEvent("reclaim", at_step=1, count=1, grace_s=5.0),
        TraceEvent("arrive", at_step=2, count=1),
    )
    life = await run_whole(tmp_path, elastic_config(preemptible_gpus=2), slowed, trace)
    assert {"rollout.2.1", "rollout.3.1"} <= set(life.cluster.started)
    found = summary(tmp_path)
    assert (found["arrivals"], found["reclaims"], found["workers_lost"]) == (3, 1, 0)
    assert found["tokens_lost_planned"] == 0


async def test_a_host_joins_a_running_job_and_leaves_it_within_its_grace(tmp_path: Path) -> None:
    visits: list[asyncio.Task[None]] = []

    def prepare(cluster: Cluster) -> None:
        slowed(cluster)

        async def visit() -> None:
            node = cluster.join("a", 2)
            await node.joined.wait()
            async with asyncio.timeout(10):
                while not any(request_of(cluster, name) for name in node.groups):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await node.notice(5.0)
            await node.all_returned.wait()
            await node.leave()

        cluster.on_step = once(lambda: visits.append(cluster.spawn(visit())), at=3)

    life = await run_whole(tmp_path, elastic_config(), prepare)
    assert [visit.done() for visit in visits] == [True]
    assert {"rollout.2.1", "rollout.3.1"} <= set(life.cluster.started)
    assert [name for name in life.cluster.started if name.startswith("rollout.0")] == ["rollout.0.1"]
    found = summary(tmp_path)
    assert (found["arrivals"], found["reclaims"], found["workers_lost"]) == (2, 2, 0)
    assert found["tokens_lost_planned"] == 0
    assert "host a has left: done" in life.stream.getvalue()


def request_of(cluster: Cluster, name: str) -> bool:
    """Whether the worker has been asked for anything."""
    worker = cluster.groups.get(name)
    return isinstance(worker, FakeRollout) and worker.sequence > 0


async def test_a_host_that_vanishes_costs_what_it_had_not_streamed(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        # Nothing ends before the host has come, worked and gone.
        gone = asyncio.Event()
        answer = cluster.kinds["environment"].handle

        async def late(self: Any, message: Any) -> Any:
            if type(message).__name__ == "StepEpisode" and "a" in cluster.nodes and not gone.is_set():
                await asyncio.sleep(0.05)
            return await answer(self, message)

        cluster.kinds["environment"] = type("Late", (cluster.kinds["environment"],), {"handle": late})

        def join() -> None:
            cluster.join("a", 1)

        cluster.on_step = once(join, at=3)

        def vanish(worker: FakeRollout) -> None:
            if worker.name == "rollout.2.1" and not gone.is_set():
                gone.set()
                cluster.nodes["a"].vanish()

        cluster.on_frame = vanish

    await run_whole(tmp_path, elastic_config(), prepare)
    found = summary(tmp_path)
    assert (found["arrivals"], found["reclaims"], found["complete"]) == (1, 1, True)


async def test_training_devices_are_lent_and_come_back(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        slowed(cluster)

    life = await run_whole(tmp_path, elastic_config(borrow="always"), prepare)
    found = summary(tmp_path)
    assert found["returns"] >= 2
    assert found["borrows"] - found["returns"] in (0, 1)  # lent for the last evaluation, the run may end so
    assert found["workers_lost"] == 0
    assert "rollout.2.1" in life.cluster.started  # the overlap worker
    assert [name for name in life.cluster.started if name.startswith("training")] == ["training.0.1"]


@pytest.mark.scenario("MH-03")
async def test_training_gets_its_devices_though_a_worker_does_not_let_go(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        slowed(cluster)
        releases = 0

        async def stuck(worker: FakeRollout) -> None:
            nonlocal releases
            releases += 1
            if releases == 2:  # the first is that of the start
                await asyncio.sleep(60)

        cluster.before_release = stuck

    config = elastic_config(borrow="always", release_limit_s=0.2)
    life = await run_whole(tmp_path, config, prepare)
    found = summary(tmp_path)
    assert found["complete"]
    assert found["returns"] >= 2
    assert found["borrows"] - found["returns"] in (0, 1)  # lent for the last evaluation, the run may end so
    assert "did not release its memory within elastic.release_limit_s" in life.stream.getvalue()


async def test_a_resumed_run_goes_on_with_its_trace(tmp_path: Path) -> None:
    config = elastic_config(preemptible_gpus=1)
    trace = (TraceEvent("arrive", at_step=0, count=1), TraceEvent("reclaim", at_step=2, count=1))
    cluster = Cluster(config)
    slowed(cluster)
    life = WholeRun(config, tmp_path, cluster, trace=trace)
    cluster.on_step = once(lambda: life.run_loop.request_stop(15), at=20)
    assert (await life.run()).exit_code == 143
    again = Cluster(config)
    slowed(again)
    second = WholeRun(config, tmp_path, again, resume=True, trace=trace)
    assert (await second.run()).exit_code == 0
    found = summary(tmp_path)
    assert (found["arrivals"], found["reclaims"]) == (1, 1)
