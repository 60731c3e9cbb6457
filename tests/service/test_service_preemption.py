"""Which GPUs arrive or are reclaimed on request, what is refused and how; traces played by time and by step."""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes import small_config
from stage import Stage, staged

from pearl.runtime.errors import RemoteError
from pearl.service.coordinator_process import how_to_join, load_trace
from pearl.service.loop.preemption import Preemption
from pearl.service.loop.trace_player import rest
from pearl.types import commands, events
from pearl.types.config import Config, ElasticConfig
from pearl.types.ids import Incarnation
from pearl.types.messages.control import Preempt, PreemptReply
from pearl.types.trace import TraceEvent


def row(
    gpu: str, zone: str = "preemptible", *, present: bool = True, reclaiming: bool = False
) -> dict[str, Any]:
    return {"gpu": gpu, "zone": zone, "present": present, "holder": None, "reclaiming": reclaiming}


TABLE = [
    row("local/0", "training"),
    row("local/1", "dedicated"),
    row("local/2"),
    row("local/3", present=False),
    row("a/0"),
    row("a/1", reclaiming=True),
    row("b/0", present=False),
    row("a/2", present=False),
]


def preemption(*, inter: bool = True) -> Preemption:
    return Preemption(lambda: {"gpus": TABLE}, lambda: {"local", "a"}, inter=inter)


def arrive(*gpus: str, count: int = 0) -> Preempt:
    return Preempt("arrive", gpus, count)


def reclaim(*gpus: str, count: int = 0, grace_s: float = 30.0) -> Preempt:
    return Preempt("reclaim", gpus, count, grace_s)


def test_arrivals_are_absent_gpus_in_order_on_hosts_that_are_there() -> None:
    assert preemption().resolve(arrive(count=2)) == events.GpusArrived(("local/3", "a/2"))  # type: ignore[arg-type]
    assert preemption().resolve(arrive("a/2")) == events.GpusArrived(("a/2",))  # type: ignore[arg-type]


def test_reclaims_are_present_gpus_the_newest_first() -> None:
    event = preemption().resolve(reclaim(count=2, grace_s=0.0), "spot")
    assert event == events.GpusReclaimed(("a/0", "local/2"), 0.0, "spot")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (arrive(count=3), "3 GPU(s) wanted, but 2 can arrive: local/3, a/2"),
        (arrive("local/2"), "local/2 is there already; those that can arrive: local/3, a/2"),
        (arrive("a/1"), "a/1 is being reclaimed: wait until it has been returned"),
        (arrive("b/0"), "b/0: host b has no agent in the run; start pearl agent there"),
        (arrive("local/1"), "local/1 is not preemptible (dedicated); preemptible are: local/2, local/3, a/0"),
        (arrive("x/0"), 'there is no GPU "x/0"; preemptible are: local/2, local/3, a/0'),
        (reclaim(count=3), "3 GPU(s) wanted, but 2 can be reclaimed: a/0, local/2"),
        (reclaim("local/3"), "local/3 is not there; those that can be reclaimed: local/2, a/0"),
        (reclaim("a/1"), "a/1 is being reclaimed already"),
        (reclaim("a/0", "a/0"), "a GPU is named twice"),
        (reclaim("a/0", count=1), "give either ids of GPUs or how many"),
        (reclaim(), "give either ids of GPUs or how many"),
        (arrive(count=-1), "-1 GPUs: give at least 1"),
        (reclaim("a/0", grace_s=-1.0), "grace of -1.0 s: give seconds from 0 on"),
        (reclaim("a/0", grace_s=float("nan")), "grace of nan s: give seconds from 0 on"),
    ],
)
def test_what_cannot_be_is_refused_with_what_there_is(request_: Preempt, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        preemption().resolve(request_)


def test_arrivals_are_refused_where_nobody_uses_them() -> None:
    with pytest.raises(ValueError, match=r"elastic\.inter = false"):
        preemption(inter=False).resolve(arrive(count=1))
    assert preemption(inter=False).resolve(reclaim(count=1))


def elastic_config() -> Config:
    return msgspec.structs.replace(small_config(), elastic=ElasticConfig(inter=True, preemptible_gpus=2))


def obey(stage: Stage) -> None:
    """Have the table follow what happens, as the core's does."""

    def follow(event: events.AnyEvent) -> None:
        if isinstance(event, events.GpusArrived | events.GpusReclaimed):
            for known in stage.core.gpus:
                if known["gpu"] in event.gpus:
                    known["present"] = isinstance(event, events.GpusArrived)

    stage.core.on_event = follow


async def test_requests_are_answered_at_once_and_two_in_a_row_never_meet(tmp_path: Path) -> None:
    async with staged(elastic_config(), tmp_path) as stage:
        obey(stage)
        stage.core.add_gpu("local/3")
        stage.core.add_gpu("local/4")
        call = stage.cluster.admin.call
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(call(arrive(count=1), deadline_s=5)) for _ in range(2)]
        assert {one.result() for one in both} == {PreemptReply(("local/3",)), PreemptReply(("local/4",))}
        with pytest.raises(RemoteError, match="but none can arrive"):
            await call(arrive(count=1), deadline_s=5)
        assert await call(reclaim("local/3", grace_s=2.0), deadline_s=5) == PreemptReply(("local/3",))
        reclaimed = await stage.event(events.GpusReclaimed)
        assert (reclaimed.gpus, reclaimed.grace_s, reclaimed.reason) == (("local/3",), 2.0, "asked for")
        assert stage.kinds().count("GpusArrived") == 2


async def test_a_trace_is_played_by_time_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    trace = (
        TraceEvent("arrive", at_s=0.02, count=1),
        TraceEvent("arrive", at_s=0.04, count=5),
        TraceEvent("reclaim", at_s=0.05, gpus=("local/3",), grace_s=0.5),
    )
    async with staged(elastic_config(), tmp_path, trace=trace) as stage:
        obey(stage)
        stage.core.add_gpu("local/3")
        assert (await stage.event(events.GpusArrived)).gpus == ("local/3",)
        assert (await stage.event(events.GpusReclaimed)).grace_s == 0.5
        async with asyncio.timeout(10):
            while "trace: all 3 events have been played" not in stage.stream.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        told = stage.stream.getvalue().partition("trace: all 3 events")[0]
        assert "trace, 0.04 s: arrive of 5 GPU(s) is left out: 5 GPU(s) wanted, but none can arrive" in told


async def test_a_trace_is_played_by_the_trainers_step(tmp_path: Path) -> None:
    trace = (TraceEvent("arrive", at_step=0, count=1), TraceEvent("arrive", at_step=1, count=1))
    async with staged(elastic_config(), tmp_path, trace=trace) as stage:
        obey(stage)
        for gpu in ("local/3", "local/4"):
            stage.core.add_gpu(gpu)
        assert (await stage.event(events.GpusArrived)).gpus == ("local/3",)
        await stage.start_trainer()
        assert stage.kinds().count("GpusArrived") == 1
        stage.order(commands.Train(stage.op(), Incarnation(1), 0, (), False))
        assert (await stage.event(events.GpusArrived)).gpus == ("local/4",)
        assert "TrainFinished" in stage.kinds()


def test_a_resumed_run_plays_the_rest_of_its_trace() -> None:
    by_time = [TraceEvent("arrive", at_s=float(second), count=1) for second in range(4)]
    assert rest(by_time, 1.5, 7) == by_time[2:]
    by_step = [TraceEvent("arrive", at_step=step, count=1) for step in range(4)]
    assert rest(by_step, 100.0, 2) == by_step[3:]


def test_tr_01_a_bad_trace_is_refused_before_anything_starts(tmp_path: Path) -> None:
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
