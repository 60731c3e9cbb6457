"""Requests for arrivals and reclaims and their answers; traces played by time and by step."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from stage import staged

from pearl.runtime.errors import RemoteError
from pearl.service.coordinator_process import how_to_join, load_trace
from pearl.service.loop.trace_player import rest
from pearl.testing.fakes import small_config
from pearl.types import commands, events
from pearl.types.config import Config, ElasticConfig
from pearl.types.ids import Incarnation
from pearl.types.messages.control import Preempt, PreemptReply
from pearl.types.trace import TraceEvent


def arrive(*gpus: str, count: int = 0) -> Preempt:
    return Preempt("arrive", gpus, count)


def reclaim(*gpus: str, count: int = 0, grace_s: float = 30.0) -> Preempt:
    return Preempt("reclaim", gpus, count, grace_s)


def elastic_config() -> Config:
    return msgspec.structs.replace(small_config(), elastic=ElasticConfig(inter=True, preemptible_gpus=2))


async def test_requests_are_answered_at_once_and_two_in_a_row_never_meet(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        stage.core.add_gpu("local/3")
        stage.core.add_gpu("local/4")
        call = stage.cluster.admin.call
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(call(arrive(count=1), deadline_s=5)) for _ in range(2)]
        assert {one.result() for one in both} == {PreemptReply(("local/3",)), PreemptReply(("local/4",))}
        with pytest.raises(RemoteError, match="but none can arrive"):
            await call(arrive(count=1), deadline_s=5)
        assert await call(reclaim("local/3", grace_s=2.0), deadline_s=5) == PreemptReply(("local/3",))
        asked = [event for event in stage.core.events if isinstance(event, events.PreemptRequested)]
        assert [(one.action, one.gpus, one.count, one.hosts) for one in asked] == [
            *[("arrive", (), 1, ("local",))] * 3,
            ("reclaim", ("local/3",), 0, ("local",)),
        ]
        assert (asked[-1].grace_s, asked[-1].reason) == (2.0, "asked for")
        assert len({one.request for one in asked}) == 4


async def test_a_trace_is_played_by_time_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    trace = (
        TraceEvent("arrive", at_s=0.02, count=1),
        TraceEvent("arrive", at_s=0.04, count=5),
        TraceEvent("reclaim", at_s=0.05, gpus=("local/3",), grace_s=0.5),
    )
    async with staged(elastic_config(), tmp_path, trace=trace) as stage:
        stage.core.add_gpu("local/3")
        asked = [await stage.event(events.PreemptRequested) for _ in trace]
        assert [(one.action, one.gpus, one.count) for one in asked] == [
            (event.action, event.gpus, event.count) for event in trace
        ]
        assert asked[-1].grace_s == 0.5
        async with asyncio.timeout(10):
            while "trace: all 3 events have been played" not in stage.stream.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        told = stage.stream.getvalue().partition("trace: all 3 events")[0]
        assert "trace, 0.04 s: arrive of 5 GPU(s) is left out: 5 GPU(s) wanted, but none can arrive" in told


async def test_a_trace_is_played_by_the_trainers_step(tmp_path: Path) -> None:
    trace = (TraceEvent("arrive", at_step=0, count=1), TraceEvent("arrive", at_step=1, count=1))
    async with staged(elastic_config(), tmp_path, trace=trace) as stage:
        for gpu in ("local/3", "local/4"):
            stage.core.add_gpu(gpu)
        await stage.event(events.PreemptRequested)
        await stage.start_trainer()
        assert stage.kinds().count("PreemptRequested") == 1
        stage.order(commands.Train(stage.op(), Incarnation(1), 0, (), False))
        await stage.event(events.PreemptRequested)
        assert "TrainFinished" in stage.kinds()


def test_a_resumed_run_plays_the_rest_of_its_trace() -> None:
    by_time = [TraceEvent("arrive", at_s=float(second), count=1) for second in range(4)]
    assert rest(by_time, 1.5, 7) == by_time[2:]
    by_step = [TraceEvent("arrive", at_step=step, count=1) for step in range(4)]
    assert rest(by_step, 100.0, 2) == by_step[3:]


@pytest.mark.scenario("TR-01")
def test_a_bad_trace_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path, said = tmp_path / "trace.jsonl", list[str]()
    path.write_text('{"time_s": 1, "arrive": 1}\n{"time_s": 2}\n')
    config = msgspec.structs.replace(small_config(), elastic=ElasticConfig(inter=True, trace=str(path)))
    with pytest.raises(ValueError, match=r"elastic\.trace: .*trace\.jsonl, line 2"):
        load_trace(config, said.append)
    path.write_text('{"time_s": 10, "arrive": 1}\n')
    fast = msgspec.structs.replace(config, elastic=ElasticConfig(inter=True, trace=str(path), trace_speed=5))
    [event] = load_trace(fast, said.append)
    assert event.at_s == 2.0
    assert load_trace(small_config(), said.append) == []
    path.write_text("t_s,gpus\n0,1\n5,6\n9,2\n")
    pool = ElasticConfig(inter=True, trace=str(path), preemptible_gpus=3)
    trace = load_trace(msgspec.structs.replace(config, elastic=pool), said.append)
    assert [(event.action, event.count) for event in trace] == [("arrive", 1), ("arrive", 2), ("reclaim", 1)]
    assert "goes beyond elastic.preemptible_gpus = 3" in said[0]


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("tcp://127.0.0.1:70", "agents of this host join with: pearl agent --coordinator 127.0.0.1:70"),
        ("tcp://localhost:70", "agents of this host join with: pearl agent --coordinator localhost:70"),
        ("tcp://[::1]:70", "agents of this host join with: pearl agent --coordinator [::1]:70"),
        ("tcp://10.0.0.2:70", "other hosts join with: pearl agent --coordinator 10.0.0.2:70"),
        ("tcp://[fe80::2]:70", "other hosts join with: pearl agent --coordinator [fe80::2]:70"),
        ("tcp://node7:70", "other hosts join with: pearl agent --coordinator node7:70"),
    ],
)
def test_who_can_join_is_told_how(address: str, advice: str) -> None:
    assert how_to_join(address).partition(" (")[0] == advice
    assert "0.0.0.0" not in how_to_join("tcp://0.0.0.0:70")
