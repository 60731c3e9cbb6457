"""Hosts that join, give notice, vanish and come back, over the real server."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from stage import Stage, staged

from pearl.config import resolved_json
from pearl.runtime.errors import RemoteError
from pearl.service.run_loop import RunFailedError
from pearl.testing.cluster import Node
from pearl.testing.fakes import small_config
from pearl.types import commands, events
from pearl.types.config import Config, ElasticConfig, RuntimeConfig
from pearl.types.ids import GpuId, Incarnation, Slot
from pearl.types.messages.control import HostPool, Preempt

A0, A1, B0 = GpuId("a/0"), GpuId("a/1"), GpuId("b/0")


def elastic_config(*, inter: bool = True) -> Config:
    runtime = RuntimeConfig(heartbeat_period_s=0.05, heartbeat_timeout_s=0.6, lease_s=5.0)
    return msgspec.structs.replace(small_config(), elastic=ElasticConfig(inter=inter), runtime=runtime)


async def join(stage: Stage, host: str, num_gpus: int, *, slot: int = 0, incarnation: int = 1) -> Node:
    node = stage.cluster.join(host, num_gpus, slot=slot, incarnation=incarnation)
    await node.joined.wait()
    return node


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is somebody else's state
            await asyncio.sleep(0.005)


async def test_a_host_joins_knowing_the_address_only_and_runs_what_its_gpus_are_given(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        a, b = await join(stage, "a", 2), await join(stage, "b", 1)
        assert (await stage.event(events.GpusArrived)).gpus == (A0, A1)
        assert (await stage.event(events.GpusArrived)).gpus == (B0,)
        assert a.peer.run_id == "run"
        for slot, gpu in enumerate((A1, B0, "local/1")):
            ready = await stage.start_worker(slot, gpu)
            assert ready.host == ("a", "b", "here")[slot]
        assert (a.groups, b.groups) == ({"rollout.0.1"}, {"rollout.1.1"})
        [spec] = a.specs
        assert spec.arguments[:6] == (
            *("--address", "{coordinator}", "--run-id", "run"),
            *("--config", "{directory}/config.json"),
        )
        assert spec.files == {"config.json": resolved_json(elastic_config()).encode()}
        assert spec.environment == {"CUDA_VISIBLE_DEVICES": ""}  # its GPUs are virtual
        assert Path(spec.log_directory).is_absolute()
        # A life is ended where it lifecycle.
        stage.order(commands.StopWorker(Slot(0), Incarnation(1), 0.0, "wanted"))
        lost = await stage.event(events.WorkerLost)
        assert (lost.slot, lost.reason) == (0, "wanted")
        assert "host a joined with a/0, a/1" in stage.stream.getvalue()


@pytest.mark.scenario("MB-02")
async def test_a_host_that_leaves_politely_touches_no_other_and_may_come_back(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        a, b = await join(stage, "a", 1), await join(stage, "b", 1)
        for slot, gpu in enumerate((A0, B0, "local/1")):
            await stage.start_worker(slot, gpu)
        staying = {name: stage.cluster.groups[name] for name in ("rollout.1.1", "rollout.2.1")}
        await a.leave()
        lost = await stage.event(events.HostLost)
        assert (lost.host, lost.reason) == ("a", "done")
        await a.gone.wait()
        await join(stage, "a", 1)
        assert (await stage.event(events.GpusArrived)).gpus == (A0,)
        await stage.start_worker(0, A0, incarnation=2)
        assert [event.slot for event in stage.core.events if isinstance(event, events.WorkerLost)] == [0]
        assert staying.items() <= stage.cluster.groups.items()
        assert b.outcome == ""
        assert set(b.groups) == {"rollout.1.1"}


async def test_a_notice_reclaims_all_gpus_of_its_host_and_returned_ones_are_told(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        a = await join(stage, "a", 2)
        stage.core.add_gpu(A0, present=True)
        stage.core.add_gpu(A1)  # reclaimed before, say
        await a.notice(7.5)
        reclaimed = await stage.event(events.GpusReclaimed)
        assert (reclaimed.gpus, reclaimed.grace_s) == ((A0, A1), 7.5)
        assert reclaimed.reason == "host a: spot"
        stage.order(commands.ReturnGpus((A1,), 0.0))
        stage.order(commands.ReturnGpus((A0,), 0.5))
        await a.all_returned.wait()
        assert a.returned == [A1, A0]
        # Nothing arrives on a host that is leaving.
        stage.core.table.rows[A0].present = False
        assert "none can arrive" in await ask_for(stage, 1)


async def ask_for(stage: Stage, count: int) -> str:
    """The error of an arrival that cannot be, asked for over the wire."""
    with pytest.raises(RemoteError) as raised:
        await stage.cluster.admin.call(Preempt("arrive", count=count), deadline_s=5)
    return raised.value.text


async def test_a_host_that_vanishes_takes_its_workers_with_it_and_nobody_else(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        a, _ = await join(stage, "a", 1), await join(stage, "b", 1)
        await stage.start_worker(0, A0)
        await stage.start_worker(1, B0)
        a.vanish()
        lost = await stage.event(events.HostLost)
        assert lost.host == "a"
        assert lost.reason.startswith("silent for")
        gone = await stage.event(events.WorkerLost)
        assert gone.slot == 0
        kinds = stage.kinds()
        assert kinds.index("HostLost") < kinds.index("WorkerLost")
        # A start on a host that is gone fails at once.
        stage.order(commands.StartWorker(stage.op(), Slot(2), Incarnation(1), "colocated", (A0,)))
        assert (await stage.event(events.WorkerLost)).reason == "host a has no agent in the run"
        assert "rollout.1.1" in stage.cluster.groups


async def test_an_agent_that_lost_us_joins_again_in_place_of_its_former_life(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        await join(stage, "a", 1, slot=7)
        await stage.start_worker(0, A0)
        again = await join(stage, "a", 1, slot=7, incarnation=2)
        assert again.error == ""
        assert (await stage.event(events.HostLost)).reason == "another agent has joined for it"
        assert (await stage.event(events.WorkerLost)).slot == 0
        await stage.start_worker(0, A0, incarnation=2)
        assert again.groups == {"rollout.0.2"}
        assert stage.kinds().count("GpusArrived") == 2


@pytest.mark.parametrize(
    ("host", "num_gpus", "inter", "error"),
    [
        ("a", 1, True, r"host a has joined already, by agent \d+: give this one another name with --host"),
        ("local", 1, True, '"local" cannot be the name of a host that joins'),
        ("c", 0, True, "host c has no GPUs: offer virtual ones with --virtual-gpus N"),
        ("c", 1, False, "elastic.inter = false: this job uses no GPUs that arrive"),
    ],
)
async def test_a_host_that_cannot_join_is_told_why(
    tmp_path: Path, host: str, num_gpus: int, inter: bool, error: str
) -> None:
    async with staged(elastic_config(inter=inter), tmp_path) as stage:
        if inter:
            await join(stage, "a", 1)
        refused = await join(stage, host, num_gpus)
        assert re.search(error, refused.error), refused.error
        assert stage.kinds().count("GpusArrived") == int(inter)


async def test_a_new_agent_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    config = msgspec.structs.replace(elastic_config(), runtime=RuntimeConfig())
    async with staged(config, tmp_path) as stage:
        killed = await join(stage, "a", 1)
        killed.kill()
        server, name = stage.server, killed.peer.name
        assert server is not None
        await until(lambda: not server.is_connected(name))
        again = await join(stage, "a", 1)
        assert again.error == ""


async def test_the_end_of_the_run_shuts_every_agent_down(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        nodes = [await join(stage, host, 1) for host in ("a", "b")]
    assert [node.outcome for node in nodes] == ["shutdown: the run is over"] * 2


def reserved_config(num_gpus: int, timeout_s: float = 10.0) -> Config:
    config = elastic_config(inter=False)
    runtime = msgspec.structs.replace(config.runtime, reserved_timeout_s=timeout_s)
    rollout = msgspec.structs.replace(config.rollout, reserved_gpus=num_gpus)
    return msgspec.structs.replace(config, runtime=runtime, rollout=rollout)


async def enter(stage: Stage, host: str, num_gpus: int, pool: HostPool = "rollout") -> Node:
    """A host of that pool asks to be taken in, and has its answer."""
    async with asyncio.timeout(10):
        await stage.cluster.is_running.wait()
        node = stage.cluster.join(host, num_gpus, pool=pool)
        await node.joined.wait()
    return node


async def test_the_run_begins_when_its_reserved_hosts_are_there_and_takes_no_more(tmp_path: Path) -> None:
    async def arrive(stage: Stage) -> None:
        await enter(stage, "a", 1)
        assert stage.kinds() == []
        await enter(stage, "b", 3)  # one is needed

    async with staged(reserved_config(2), tmp_path, before=arrive) as stage:
        [started] = [event for event in stage.core.events if isinstance(event, events.Started)]
        assert started.reserved == (A0, B0)
        assert "note: of the 3 GPUs of reserved host b 1 are used" in stage.stream.getvalue()
        refused = await enter(stage, "c", 1)
        assert "the 2 reserved GPUs that the job awaits are there: join with --pool spot" in refused.error
        assert "GpusArrived" not in stage.kinds()


async def test_a_reserved_host_that_leaves_is_lost_and_its_successor_is_reserved_too(tmp_path: Path) -> None:
    async def arrive(stage: Stage) -> None:
        await enter(stage, "a", 1)

    async with staged(reserved_config(1), tmp_path, before=arrive) as stage:
        await stage.cluster.nodes["a"].notice(5.0)
        assert (await stage.event(events.HostLost)).host == "a"
        assert "GpusReclaimed" not in stage.kinds()
        assert "1 reserved GPU(s) are gone, and awaited for 10 s" in stage.stream.getvalue()
        await enter(stage, "b", 1)
        arrived = await stage.event(events.GpusArrived)
        assert (arrived.gpus, arrived.reserved) == ((B0,), True)


async def test_the_run_ends_when_a_lost_reserved_host_stays_away(tmp_path: Path) -> None:
    async def arrive(stage: Stage) -> None:
        await enter(stage, "a", 1)

    async with staged(reserved_config(1, timeout_s=0.5), tmp_path, before=arrive) as stage:
        await stage.cluster.nodes["a"].leave()
        assert (await stage.event(events.StopRequested)).signal == 15
        assert "0 of rollout.reserved_gpus = 1 were there" in stage.run_loop.failure


@pytest.mark.parametrize(
    ("pool", "reserved", "error"),
    [
        ("rollout", 0, "rollout.reserved_gpus = 0: this job awaits no reserved host; join with --pool spot"),
        ("spot", 0, "host old took part in this run with --pool rollout: keep the pool"),
        ("local", 0, "host old names no pool"),
    ],
)
async def test_a_host_of_the_wrong_pool_is_refused(
    tmp_path: Path, pool: HostPool, reserved: int, error: str
) -> None:
    async def arrive(stage: Stage) -> None:
        stage.core.pools["old"] = "rollout"

    config = msgspec.structs.replace(reserved_config(reserved), elastic=ElasticConfig(inter=True))
    async with staged(config, tmp_path, before=arrive) as stage:
        refused = await enter(stage, "old", 1, pool)
        assert error in refused.error


async def test_a_run_whose_reserved_hosts_do_not_come_says_who_is_missing(tmp_path: Path) -> None:
    stage = Stage(reserved_config(2, timeout_s=0.3), tmp_path, ())
    try:
        async with stage.run_loop.make_server() as server, asyncio.TaskGroup() as group:
            cluster = group.create_task(stage.cluster.run())
            with pytest.raises(ExceptionGroup) as raised:
                await stage.run_loop.run(server)
            cluster.cancel()
        [error] = raised.value.exceptions
        assert isinstance(error, RunFailedError)
        assert (
            "0 of rollout.reserved_gpus = 2 were there after runtime.reserved_timeout_s = 0.3 (no host)"
            in str(error)
        )
        assert stage.core.events == []
    finally:
        stage.journal.close()
        stage.files.close()
