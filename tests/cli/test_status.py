"""``pearl status`` against a server that answers as the coordinator does, one that is silent, and none."""

import json
from pathlib import Path
from typing import Any

import pytest
from live_coordinator import LiveCoordinator

from pearl.cli import coordinator_client, main
from pearl.cli.tables import gpu_names

ANSWER: dict[str, Any] = {
    "step": 3,
    "weight_version": 2,
    "workers": [
        {
            "slot": 0,
            "incarnation": 2,
            "role": "colocated",
            "zone": "dedicated",
            "activity": "active",
            "condition": "serving",
            "gpus": ["host/0"],
            "weight_version": None,
            "host": "host",
            "pid": 4711,
        }
    ],
}
WORKER = ANSWER["workers"][0]
ASLEEP = {**WORKER, "slot": 1, "zone": "overlap", "activity": "inactive", "condition": "asleep"}
GPUS: list[dict[str, Any]] = [
    {
        "gpu": "host/0",
        "pool": "rollout",
        "zone": "dedicated",
        "present": True,
        "holder": "slot 0",
        "reclaiming": False,
    },
    {"gpu": "host/1", "zone": "training", "present": True, "holder": "training", "reclaiming": False},
    {"gpu": "host/2", "zone": "preemptible", "present": True, "holder": None, "reclaiming": True},
    {"gpu": "host/3", "zone": "preemptible", "present": False, "holder": None, "reclaiming": False},
]
GPUS[2]["reclaim_seconds_left"] = 12.34


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def test_json_is_the_answer_as_it_came(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveCoordinator(run_dir, lambda: ANSWER):
        assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


def test_tables_fit_into_80_columns(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = {**ANSWER, "trainer": "idle", "workers": [WORKER, ASLEEP], "gpus": GPUS}
    with LiveCoordinator(run_dir, lambda: answer):
        assert main(["status", "--run-dir", str(run_dir)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert max(len(" ".join(line)) for line in lines) <= 80
    assert ["0.2", "host/0", "colocated", "dedicated", "active", "-", "-"] in lines
    assert ["1.2", "host/0", "colocated", "overlap", "asleep", "-", "-"] in lines
    assert ["host/0", "rollout", "dedicated", "yes", "worker", "0", "-"] in lines
    assert ["host/1", "-", "training", "yes", "training", "-"] in lines
    assert ["host/2", "-", "preemptible", "yes", "free", "12.3", "s"] in lines
    assert ["host/3", "-", "preemptible", "no", "-", "-"] in lines


def test_the_steps_progress_is_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = {"num_steps": 20, "reward_mean": 0.5125, "step_seconds": 3.24, "finished": 7, "batch_size": 16}
    with LiveCoordinator(run_dir, lambda: {**ANSWER, **progress}):
        assert main(["status"]) == 0
    printed = capsys.readouterr().out
    assert "step 3 of 20, weight version 2" in printed
    assert "reward 0.512, 3.2 s a step, 7 of 16 trajectories finished" in printed


def test_before_the_first_step_only_the_progress_is_known(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"reward_mean": None, "step_seconds": None, "finished": 0, "batch_size": 16}
    with LiveCoordinator(run_dir, lambda: {**ANSWER, **unknown}):
        assert main(["status"]) == 0
    assert "\n0 of 16 trajectories finished\n" in capsys.readouterr().out


def test_a_narrow_window_cuts_no_cell(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    with LiveCoordinator(run_dir, lambda: {**ANSWER, "workers": [WORKER, ASLEEP], "gpus": GPUS}):
        assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    assert sum(line.startswith("1.2 ") for line in lines) == 2, "each part of the table names its workers"
    assert sum(line.startswith("host/3 ") for line in lines) == 2


def test_a_pipe_shows_the_processes_too(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no width of its own, so nothing is left out for it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    with LiveCoordinator(run_dir, lambda: ANSWER):
        assert main(["status"]) == 0
    printed = capsys.readouterr().out
    assert "step 3, weight version 2" in printed
    assert "4711" in printed


def test_an_older_answer_and_a_sparse_one_are_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveCoordinator(run_dir, lambda: {"workers": [{}], "gpus": [{"gpu": "a/0", "reclaiming": True}]}):
        assert main(["status"]) == 0
    assert "reclaimed" in capsys.readouterr().out
    with LiveCoordinator(run_dir, lambda: {"step": 0, "workers": []}):
        assert main(["status"]) == 0
    assert "no rollout workers" in capsys.readouterr().out


def test_it_says_which_of_several_runs_it_shows(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveCoordinator(run_dir, lambda: ANSWER), LiveCoordinator(tmp_path / "b", lambda: ANSWER, "s"):
        assert main(["status", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == ANSWER
    assert "2 runs are live" in printed.err
    assert f"--run-dir names another: {run_dir}" in printed.err


def test_watch_shows_until_the_run_ends(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = iter(range(3))

    def answer() -> dict[str, Any]:
        step = next(steps)
        if step == 2:
            coordinator.end()
        return {"step": step, "workers": []}

    with LiveCoordinator(run_dir, answer) as coordinator:
        assert main(["status", "--watch", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("step 0") < printed.index("step 1")
    assert "the run has ended: the run is over" in printed


@pytest.mark.parametrize("seconds", ["0", "nan", "-1", "x", "1e9"])
def test_watch_refuses_what_is_no_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--watch={seconds}"]) == 2
    assert "--watch" in capsys.readouterr().err


def test_a_silent_coordinator_is_given_up(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coordinator_client, "DEADLINE_S", 0.3)
    with LiveCoordinator(run_dir, None):
        assert main(["status"]) == 1
    assert "no answer from tcp://127.0.0.1:" in capsys.readouterr().err


def test_no_live_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "no live run on this host" in capsys.readouterr().err
    assert main(["status", "--run-dir", str(run_dir)]) == 1
    assert f"no live run in {run_dir}" in capsys.readouterr().err
    assert main(["status", "--run-dir", "absent"]) == 2


def test_gpus_of_one_host_are_joined() -> None:
    assert gpu_names(["a/0", "a/1", "b/0"]) == "a/0,1 b/0"
    assert gpu_names(["b"]) == "b"
    assert gpu_names([]) == "-"
