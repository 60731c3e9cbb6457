"""Elasticity with real processes: GPUs arrive, are reclaimed, lent and returned; workers and hosts die meanwhile."""

import signal
import time
from pathlib import Path

import pytest

from pearl.testing.elastic_run import ELASTIC, Workers, far_host, is_lent, pearl, preempt
from pearl.testing.live_run import LiveRun, started

pytestmark = pytest.mark.timeout(300)
OVERLAP, JOINER = 2, 3  # slots: 0 and 1 are dedicated


def assert_replays(run: LiveRun) -> None:
    result = pearl("replay", str(run.run_dir))
    assert result.returncode == 0, result.stdout + result.stderr


def gpu_events(run: LiveRun, event: str) -> list[dict[str, object]]:
    return [line for line in run.metrics("gpus") if line["event"] == event]


@pytest.mark.scenario("PR-01")
def test_gpus_come_and_go_while_workers_die(tmp_path: Path) -> None:
    """A planned reclaim loses nothing and touches nobody else; kills are made up for; Ctrl-C amid an expansion while
    GPUs are lent leaves nothing."""
    settings = {**ELASTIC, "elastic__preemptible_gpus": 1, "weights__transport": "link"}
    with started(tmp_path / "run", **settings) as run:
        workers = Workers(run)
        run.wait_for_step(1)
        preempt(run, "arrive", "--gpus", "local/3")
        workers.wait_for(JOINER, 1)
        for victim in (OVERLAP, JOINER):
            (process,) = run.ranks(f"rollout.{victim}.")
            process.kill()
        workers.wait_for(JOINER, 2)
        run.wait_for("a new overlap worker", lambda: workers.has_served_again(OVERLAP))

        survivors = {slot: workers.place(slot) for slot in (0, 1)}
        overlap = run.ranks(f"rollout.{OVERLAP}.")  # whose links a return may break off
        preempt(run, "reclaim", "--gpus", "local/3", "--grace", "5")
        (returned,) = run.wait_for("the GPU's return", lambda: gpu_events(run, "returned"))
        assert returned["on_time"], run.text()
        assert not run.ranks(f"rollout.{JOINER}.")
        run.wait_for_step(len(run.steps()) + 1)
        assert {slot: workers.place(slot) for slot in survivors} == survivors
        assert run.ranks(f"rollout.{OVERLAP}.") == overlap

        preempt(run, "arrive", "--gpus", "1")
        workers.wait_for(JOINER, 3, "starting")
        run.wait_for("the training GPUs to be lent", lambda: is_lent(run))
        assert "serving" not in workers.told(JOINER, 3)
        run.kill(signal.SIGINT)
        run.assert_stops(130)
    summary = run.assert_clean()
    assert summary["tokens_lost_planned"] == 0
    assert summary["workers_lost"] == 2
    assert summary["trainers_lost"] == 0
    assert (summary["arrivals"], summary["reclaims"]) == (2, 1)
    assert summary["borrows"] >= 2
    assert summary["returns"] >= 2
    assert_replays(run)


@pytest.mark.slow
@pytest.mark.scenario("AG-01")
def test_other_hosts_join_leave_and_die(tmp_path: Path) -> None:
    """Two agents' workers serve; the host that gives notice is given back in its grace, the one that dies is missed."""
    with (
        started(tmp_path / "run", **ELASTIC) as run,
        far_host(run, "far1") as leaver,
        far_host(run, "far2") as victim,
    ):
        workers = Workers(run)
        run.wait_for("both hosts", lambda: len(gpu_events(run, "arrived")) == 2)
        workers.wait_for(JOINER, 1)
        workers.wait_for(JOINER + 1, 1)
        run.wait_for_step(len(run.steps()) + 1)

        began = time.monotonic()
        assert leaver.leave(10) == 0, leaver.output.read_text()
        assert time.monotonic() - began < 5
        assert "all GPUs were given back" in leaver.output.read_text()
        victim.kill()
        run.wait_for("the host to be missed", lambda: "host far2 has left" in run.text())
        run.wait_for("its worker's end", lambda: not run.ranks(f"rollout.{JOINER}") and len(gone(run)) == 2)
        run.wait_for_step(len(run.steps()) + 2)
        assert workers.told(0, 1)[-1] != "gone"
        run.kill(signal.SIGINT)
        run.assert_stops(130)
    summary = run.assert_clean()
    assert summary["tokens_lost_planned"] == 0
    assert summary["trainers_lost"] == 0
    assert (summary["arrivals"], summary["reclaims"], summary["workers_lost"]) == (2, 2, 1)
    assert_replays(run)


def gone(run: LiveRun) -> list[dict[str, object]]:
    return [line for line in run.metrics("worker") if line["event"] == "gone"]


@pytest.mark.slow
@pytest.mark.scenario("WS-11")
def test_a_receiver_stops_amid_a_push(tmp_path: Path) -> None:
    """The trainer is free within the deadline, the other worker has one whole version, the next push iterations."""
    settings = {
        **ELASTIC,
        "elastic__borrow": "never",
        "weights__transport": "link",
        "weights__bucket_bytes": 4096,  # so many that the push is long enough to be met
        "weights__bucket_deadline_s": 1.0,
        "runtime__heartbeat_timeout_s": 4.0,
    }
    with started(tmp_path / "run", **settings) as run:
        workers = Workers(run)
        run.wait_for_step(1)
        (process,) = run.ranks("rollout.0.1")
        count = workers.told(0, 1).count("updating")
        run.wait_for("the next push", lambda: workers.told(0, 1).count("updating") > count)
        process.send_signal(signal.SIGSTOP)
        steps, began = len(run.steps()), time.monotonic()
        run.wait_for_step(steps)
        seconds = time.monotonic() - began
        workers.wait_for(0, 2)
        run.wait_for_step(len(run.steps()) + 1)
        run.kill(signal.SIGINT)
        run.assert_stops(130)
    summary = run.assert_clean()
    assert summary["workers_lost"] == 1
    assert summary["trainers_lost"] == 0
    assert "gone" not in workers.told(1, 1)[:-1]
    assert seconds < 15, seconds
    assert_replays(run)
