"""The main job with real processes: it runs, survives kills, stops cleanly, and resumes as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pearl.testing.live_run import ROOT, LiveRun, read_lines, resumed, started

pytestmark = pytest.mark.timeout(300)


def replay(run_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pearl.cli", "replay", str(run_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def losses(run: LiveRun) -> list[float]:
    return [line["loss"] for line in run.steps()]


def samples(run: LiveRun) -> dict[int, Any]:
    """What was generated for each trained trajectory: counts, rewards and outcome."""
    lines = read_lines(run.run_dir / "trajectories.jsonl")
    return {
        line["trajectory"]: (
            line["reward"],
            line["outcome"],
            [(turn["new_prompt_tokens"], turn["generated_tokens"]) for turn in line["turns"]],
        )
        for line in lines
        if line["evaluation"] is None and line["trained_step"] is not None
    }


@pytest.mark.scenario("WS-10", "PL-02")
def test_kills_and_stops_hurt_only_themselves(tmp_path: Path) -> None:
    """kill -9 of a rollout worker, SIGSTOP of another, kill -9 of a training rank: replaced in place, all counted.
    Then kill -9 of the node agent, which ends the run and leaves nothing."""
    settings = {"run__num_steps": 5000, "environment__num_evaluation_tasks": 0, "training__num_ranks": 2}
    with started(tmp_path / "run", **settings) as run:
        run.wait_for_step(1)
        assert [len(run.ranks(group)) for group in ("training.0.1", "rollout.0.1", "rollout.1.1")] == [
            2,
            1,
            1,
        ]
        logs = run.run_dir / "logs" / "training.0.1"
        assert sorted(path.name for path in logs.glob("rank*.log")) == ["rank0.log", "rank1.log"]
        for process in run.ranks("rollout.0.1"):
            process.kill()
        run.wait_for("a second life of slot 0", lambda: run.ranks("rollout.0.2"))
        for process in run.ranks("rollout.1.1"):
            process.send_signal(signal.SIGSTOP)
        run.wait_for("a second life of slot 1", lambda: run.ranks("rollout.1.2"))
        run.wait_for("both serving", lambda: "workers 2/2" in run.text().splitlines()[-1])
        before = {p.pid for p in run.ranks("rollout.")}
        step = len(run.steps())
        run.ranks("training.0.1")[0].kill()  # one of two: the world is one fault domain
        run.wait_for("a second training world", lambda: run.ranks("training.0.2"))
        run.wait_for_step(step)
        assert before & {p.pid for p in run.ranks("rollout.")} == before, run.text()[-3000:]
        run.wait_for("both workers serving again", lambda: "workers 2/2" in run.text().splitlines()[-1])
        # As long as it takes, not as many steps: machines differ.
        (agent,) = [p for p in run.processes("agent") if p.pid != os.getpid()]
        agent.kill()
        run.assert_stops(1)
    assert "node agent" in run.text()
    summary = run.assert_clean()
    assert summary["steps"] > step
    assert summary["workers_lost"] == 2
    assert summary["trainers_lost"] == 1
    assert summary["lineages"][1][0] == 1
    run.assert_nothing_left(1.0)
    assert replay(run.run_dir).returncode == 0


SYNCHRONOUS: dict[str, Any] = {"rollout__staleness_bound": 0, "run__num_steps": 5}


class Finished(NamedTuple):
    """What an uninterrupted run left."""

    run: LiveRun
    samples: dict[int, Any]
    losses: list[float]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    with started(tmp_path_factory.mktemp("base") / "run", **SYNCHRONOUS) as run:
        assert run.wait() == 0, run.text()
    return Finished(run, samples(run), losses(run))


def test_a_run_from_start_to_end(uninterrupted: Finished) -> None:
    run = uninterrupted.run
    summary = run.assert_clean()
    assert summary["steps"] == 5
    assert summary["trajectories_trained"] == 5 * 16
    assert summary["max_staleness"] == summary["staleness_bound"] == 0
    assert summary["logprob_gap_tokens"] > 0
    assert summary["max_logprob_gap"] <= 1e-3
    assert summary["workers_lost"] == summary["tokens_lost"] == 0
    assert (run.run_dir / "report.html").stat().st_size > 1000
    run.assert_nothing_left(1.0)
    result = replay(run.run_dir)
    assert result.returncode == 0, result.stdout + result.stderr


def test_staleness_0_has_the_losses_of_a_plain_synchronous_loop(uninterrupted: Finished) -> None:
    script = ROOT / "tests" / "e2e" / "synchronous_loop.py"
    result = subprocess.run(
        [sys.executable, str(script), str(uninterrupted.run.run_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert uninterrupted.losses == pytest.approx(json.loads(result.stdout), abs=1e-5)


def crash(run: LiveRun, rng: random.Random) -> None:
    """kill -9 of the coordinator anywhere in the first steps."""
    run.wait_for_step(rng.randrange(0, SYNCHRONOUS["run__num_steps"] - 2))
    lines = len(read_lines(run.run_dir / "metrics.jsonl")) + rng.randrange(0, 6)
    run.wait_for("some more", lambda: len(read_lines(run.run_dir / "metrics.jsonl")) >= lines)
    run.kill()
    run.process.wait()
    run.assert_nothing_left()


def assert_goes_on(run_dir: Path, expected: Finished) -> None:
    """To the end, and as if nothing had happened."""
    with resumed(run_dir) as run:
        assert run.wait() == 0, run.text()
    run.assert_clean()
    assert samples(run) == expected.samples
    assert losses(run) == pytest.approx(expected.losses, abs=1e-5)
    assert replay(run_dir).returncode == 0


@pytest.mark.scenario("PL-01", "PL-02", "CK-01")
def test_stopped_and_resumed_killed_and_resumed(tmp_path: Path, uninterrupted: Finished) -> None:
    with started(tmp_path / "run", **SYNCHRONOUS) as run:
        run.wait_for_step(0)
        run.kill(signal.SIGINT)
        run.assert_stops(130)
    assert run.summary()["complete"] is False
    with resumed(tmp_path / "run") as run:
        crash(run, random.Random("0/kill"))
    assert_goes_on(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_coordinator_killed_anywhere_and_resumed(tmp_path: Path, seed: int, uninterrupted: Finished) -> None:
    with started(tmp_path / "run", **SYNCHRONOUS) as run:
        crash(run, random.Random(f"{seed}/kill"))
    assert_goes_on(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.scenario("PL-01")
def test_a_signal_while_starting(tmp_path: Path, number: int, code: int) -> None:
    with started(tmp_path / "run") as run:
        run.wait_for(
            "its first processes", lambda: (run.run_dir / "run_id").exists() and run.processes("agent")
        )
        run.kill(number)
        run.assert_stops(code)
