"""Whole simulated runs: the same seed gives the same journal, nothing is lost, elasticity and faults included."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sim_runs import HARDWARE, SMALL, small_job

from pearl.core.coordinator import Coordinator
from pearl.runtime.journal import FORMAT, Entry, Journal, Opening, Segment
from pearl.service import replay
from pearl.service.loop.pending_preempts import PendingPreempts
from pearl.service.replay import encode_commands, encode_event
from pearl.sim.job import Result, build, run
from pearl.types.commands import AnswerPreempt, AnyCommand
from pearl.types.events import AnyEvent, PreemptRequested
from pearl.types.ids import GpuId
from pearl.types.messages.control import Preempt
from pearl.types.trace import TraceEvent

COMINGS_AND_GOINGS = (
    TraceEvent("arrive", at_s=0.0, count=4),
    TraceEvent("reclaim", at_s=300.0, count=2, grace_s=30.0),
    TraceEvent("arrive", at_s=500.0, count=2),
    TraceEvent("reclaim", at_s=700.0, count=4, grace_s=1.0),
    TraceEvent("arrive", at_s=900.0, count=4),
)
ELASTIC = ("elastic.inter=true", "elastic.borrow=always")


def journal_of(**job: Any) -> list[tuple[float, bytes, bytes]]:
    made = small_job(**job)
    simulation = build(made)
    entries: list[tuple[float, bytes, bytes]] = []

    def sink(now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        entries.append((now, encode_event(event), encode_commands(commands)))

    simulation._sink = sink
    simulation.run(made.horizon_s)
    return entries


def digest(entries: list[tuple[float, bytes, bytes]]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(entries)).hexdigest()


def test_same_seed_same_journal_byte_for_byte() -> None:
    job = {"overrides": ELASTIC, "trace": COMINGS_AND_GOINGS}
    assert digest(journal_of(**job)) == digest(journal_of(**job))


def test_another_seed_is_another_run() -> None:
    assert digest(journal_of(seed=1)) != digest(journal_of(seed=2))


def test_its_journal_replays_on_a_fresh_core(tmp_path: Path) -> None:
    job = small_job(overrides=ELASTIC, trace=COMINGS_AND_GOINGS)
    entries = journal_of(overrides=ELASTIC, trace=COMINGS_AND_GOINGS)
    snapshot = Coordinator(job.config).snapshot()
    journal = Journal.create(tmp_path / "journal.msgpack", snapshot)
    journal.append(entries)
    journal.close()
    raw = [Entry(now, msgspec.Raw(event), msgspec.Raw(commands)) for now, event, commands in entries]
    segment = Segment(Opening(FORMAT, 0, snapshot), raw, 0)
    assert replay.replay(Coordinator.restore(job.config, snapshot), segment) is None


def run_checked(**job: Any) -> Result:
    """Run with the core's invariants checked after every event, and each prompt trained exactly once."""
    made = small_job(**job)
    simulation = build(made)
    simulation._sink = lambda now, event, commands: simulation.core.check()
    finish = simulation.run(made.horizon_s)
    group, batch = made.config.data.group_size, made.config.data.batch_size
    assert group < batch
    trained = [trajectory for _, trajectories in simulation.training.trained for trajectory in trajectories]
    assert trained == list(range(len(trained)))
    assert [step for step, _ in simulation.training.trained] == list(range(len(trained) // batch))
    assert finish.summary["prompts_trained_twice"] == finish.summary["prompts_lost"] == 0
    return run(made)


def test_every_prompt_is_trained_once_by_a_fixed_pool() -> None:
    result = run_checked()
    assert result.steps >= 3
    assert result.tokens_lost == 0
    assert 0 < result.rollout_busy_ratio < 1
    assert 0 < result.training_busy_ratio < 1
    assert result.gpu_hours == pytest.approx(8 * SMALL.horizon_s / 3600)


@pytest.mark.parametrize("start", ["strict", "early"])
def test_every_prompt_is_trained_once_when_gpus_come_and_go(start: str) -> None:
    result = run_checked(overrides=(*ELASTIC, f"rollout.start={start}"), trace=COMINGS_AND_GOINGS)
    assert result.arrivals == 10
    assert result.reclaims == 6
    assert result.borrows >= 2
    assert result.max_staleness <= 1
    assert result.activation_seconds == pytest.approx(6.26, abs=1.0)
    assert result.deactivation_seconds == pytest.approx(3.18, abs=1.0)


def test_every_prompt_is_trained_once_when_workers_and_environments_fail() -> None:
    failures = msgspec.structs.replace(HARDWARE.failures, worker_hours=0.05, environment_rate=0.02)
    hardware = msgspec.structs.replace(HARDWARE, failures=failures)
    result = run_checked(hardware=hardware, overrides=("runtime.max_restarts=1000",))
    assert result.steps >= 1
    assert result.interrupted_attempts > 0
    assert 0 < result.tokens_lost < 200


@pytest.mark.parametrize("mode", ["in_place", "drain"])
def test_every_prompt_is_trained_once_however_weights_are_taken(mode: str) -> None:
    result = run_checked(overrides=("rollout.start=early", f"rollout.update_mode={mode}"))
    assert result.steps >= 3
    assert result.interrupted_attempts == 0


@pytest.mark.parametrize("start", ["strict", "early"])
def test_every_prompt_is_trained_once_by_pairs_that_come_go_and_fail(start: str) -> None:
    failures = msgspec.structs.replace(HARDWARE.failures, worker_hours=0.2)
    hardware = msgspec.structs.replace(HARDWARE, failures=failures)
    overrides = (*ELASTIC, f"rollout.start={start}", "runtime.max_restarts=1000")
    result = run_checked(hardware=hardware, overrides=overrides, trace=COMINGS_AND_GOINGS, pd="1P2D")
    assert result.steps >= 1
    assert result.arrivals == 10


def test_preemptible_gpus_make_it_faster_and_cost_gpu_hours() -> None:
    arrived = (TraceEvent("arrive", at_s=0.0, count=4),)
    slow, fast = (run(small_job(overrides=o, trace=arrived)) for o in ((), ("elastic.inter=true",)))
    assert fast.throughput_tokens_per_s > slow.throughput_tokens_per_s
    assert slow.arrivals == 0
    assert fast.gpu_hours == pytest.approx(slow.gpu_hours + 4 * SMALL.horizon_s / 3600)


def test_what_a_trace_asks_for_in_vain_is_told() -> None:
    trace = (
        TraceEvent("arrive", at_s=0.0, count=2),
        TraceEvent("reclaim", at_s=5.0, gpus=(GpuId("local/999"),)),
        TraceEvent("reclaim", at_s=9.0, count=3),
    )
    result = run(small_job(overrides=("elastic.inter=true",), trace=trace))
    assert result.note == (
        "2 event(s) of the trace were left out in part or whole, first: reclaim of local/999 at 5 s: "
        'there is no GPU "local/999"; preemptible are: local/8, local/9, local/10'
    )
    assert result.reclaims == 0


def test_policies_meet_the_same_work() -> None:
    """Scripts depend on seed and trajectory only, so equal seeds can be compared in pairs."""
    sticky, spread = (
        build(small_job(overrides=(f"rollout.router={router}",))) for router in ("sticky", "least-loaded")
    )
    for simulation in (sticky, spread):
        simulation.run(400.0)
    shared = sticky.environments.episodes.keys() & spread.environments.episodes.keys()
    assert shared
    for trajectory in shared:
        assert (
            sticky.environments.episodes[trajectory].script == spread.environments.episodes[trajectory].script
        )


def test_steps_by_number_drive_a_trace() -> None:
    trace = (TraceEvent("arrive", at_step=1, count=2), TraceEvent("reclaim", at_step=2, count=2))
    result = run(small_job(overrides=("elastic.inter=true",), trace=trace))
    assert (result.arrivals, result.reclaims) == (2, 2)


def test_a_live_run_chooses_the_gpus_that_the_simulator_chooses() -> None:
    """The simulated run again, on a fresh core, with the requests as the live trace player makes them."""
    job = small_job(overrides=ELASTIC, trace=COMINGS_AND_GOINGS)
    simulation = build(job)
    entries: list[tuple[float, AnyEvent, list[AnyCommand]]] = []
    simulation._sink = lambda now, event, commands: entries.append((now, event, commands))
    simulation.run(job.horizon_s)
    live, pending, chosen = Coordinator(job.config), PendingPreempts(), list[tuple[GpuId, ...]]()
    trace = iter(COMINGS_AND_GOINGS)
    for now, event, _ in entries:
        if isinstance(event, PreemptRequested):
            one = next(trace)
            message = Preempt(one.action, one.gpus, one.count, one.grace_s)
            asked = pending.add(message, chosen.append, lambda error: pytest.fail(str(error)))
            event = msgspec.structs.replace(asked, hosts=("local",))
        for command in live.handle(event, now):
            if isinstance(command, AnswerPreempt):
                pending.answer(command)
    answers = [c.gpus for _, _, done in entries for c in done if isinstance(c, AnswerPreempt)]
    assert chosen == answers
    assert [len(gpus) for gpus in chosen] == [4, 2, 2, 4, 4]
