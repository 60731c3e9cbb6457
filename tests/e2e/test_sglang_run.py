"""Whole jobs with SGLang engines: they learn, lend their trainer's GPU, and survive kills; nothing is left of them."""

import os
import signal
from pathlib import Path

import pytest
import sglang_support
from sglang_run import (
    LIMIT_S,
    Belongings,
    resident_bytes,
    servers,
    sglang_job,
    stop,
    wait_for_serving,
    wait_for_step,
)

from pearl.testing.elastic_run import Workers, is_lent, pearl
from pearl.testing.live_run import LiveRun

pytestmark = [
    pytest.mark.skipif(bool(sglang_support.why_not()), reason=sglang_support.why_not()),
    pytest.mark.timeout(2000),
    pytest.mark.slow,
]
PAIR = pytest.param(
    {"rollout__num_workers": 2, "elastic__pd": "1P1D"},
    id="pair",
    marks=pytest.mark.skipif(bool(sglang_support.why_no_pairs()), reason=sglang_support.why_no_pairs()),
)
LARGE = {
    "model__num_layers": 6,
    "model__hidden_size": 256,
    "model__ffn_size": 2048,
    "data__batch_size": 16,
    "data__group_size": 4,
    "warm_start__num_steps": 0,
}
WEIGHT_BYTES = 6 * 3 * 256 * 2048 * 4
LONG = {"run__num_steps": 5000, "environment__num_evaluation_tasks": 0}  # until it is stopped


def assert_right(run: LiveRun) -> None:
    """Counters agree, and every log-prob is the one that the trainer's own pass gives."""
    summary = run.assert_clean()
    assert summary["logprob_gap_tokens"] > 0
    assert summary["max_logprob_gap"] <= 1e-4
    assert summary["max_staleness"] <= summary["staleness_bound"]
    result = pearl("replay", str(run.run_dir))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("settings", [pytest.param({}, id="colocated"), PAIR])
def test_the_shipped_job_runs_to_its_end(tmp_path: Path, settings: dict[str, object]) -> None:
    with sglang_job(tmp_path / "run", **settings) as run:
        wait_for_step(run, 0)
        belongings = Belongings.of([p for slot in (0, 1) for p in servers(run, slot)])
        assert run.wait(LIMIT_S) == 0, run.text()
        belongings.assert_gone(1.0)
    assert_right(run)
    summary = run.summary()
    assert summary["steps"] == 5
    assert summary["workers_lost"] == summary["tokens_lost"] == 0


@pytest.mark.skipif(bool(sglang_support.why_no_pairs()), reason=sglang_support.why_no_pairs())
@pytest.mark.parametrize("slot", [0, 1], ids=["prefill", "decode"])
@pytest.mark.scenario("WS-10")
def test_a_half_of_the_only_pair_is_killed_and_the_job_goes_on(tmp_path: Path, slot: int) -> None:
    """First SGLang alone, then, with its successor serving, the worker; the other half stays."""
    with sglang_job(tmp_path / "run", rollout__num_workers=2, elastic__pd="1P1D", **LONG) as run:
        wait_for_step(run, 0)
        other = run.ranks(f"rollout.{1 - slot}.1")
        for incarnation in (2, 3):
            belongings = Belongings.of(servers(run, slot))
            victims = servers(run, slot) if incarnation == 2 else run.ranks(f"rollout.{slot}.")
            victims[0].kill()
            belongings.assert_gone()
            done = len(run.steps())
            wait_for_serving(run, slot, incarnation)
            wait_for_step(run, done + 1)
        assert run.ranks(f"rollout.{1 - slot}.1") == other
        stop(run, signal.SIGTERM)
    assert_right(run)
    assert run.summary()["workers_lost"] == 2


def resident_while(run: LiveRun, workers: Workers, slot: int, condition: str) -> int:
    """Bytes of the slot's SGLang in that condition; 0 when it was over too soon to tell."""

    def is_so() -> bool:
        return workers.told(slot, 1)[-1] == condition

    run.wait_for(f"slot {slot} to be {condition}", is_so, LIMIT_S)
    size = resident_bytes(servers(run, slot))
    return size if is_so() else 0


def test_gpus_are_lent_to_sglang_and_given_back(tmp_path: Path) -> None:
    """Its memory falls each time, what it makes after that is right, and Ctrl-C while they are lent leaves nothing."""
    overlap = 1
    freed: list[int] = []
    with sglang_job(tmp_path / "run", elastic__borrow="always", **LONG, **LARGE) as run:
        workers = Workers(run)
        wait_for_serving(run, overlap, 1)
        while len(freed) < 3:
            held = resident_while(run, workers, overlap, "serving")
            left = resident_while(run, workers, overlap, "asleep")
            if held and left:
                freed.append(held - left)
        run.wait_for("a loan", lambda: is_lent(run), LIMIT_S)
        stop(run, signal.SIGINT)
    assert_right(run)
    summary = run.summary()
    assert summary["borrows"] >= 3
    assert summary["workers_lost"] == summary["tokens_lost"] == 0
    assert min(freed) > WEIGHT_BYTES / 2, freed  # in use it grows a little, whatever it lets go


@pytest.mark.scenario("PL-02")
def test_nothing_of_sglang_outlives_kill_9_of_the_job(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with sglang_job(tmp_path / "run", **LONG) as run:
        wait_for_step(run, 0)
        stop(run, signal.SIGKILL)
    assert not {name for name in os.listdir("/dev/shm") if name.startswith("sgl")} - before
