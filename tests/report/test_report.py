"""The report of a whole run, of one cut short, and of nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from pearl.report import timeline
from pearl.report.reading import read_run, straighten
from pearl.report.report import build, headlines


def worker(
    time_s: float, event: str, version: int | None = None, slot: int = 0, **more: Any
) -> dict[str, Any]:
    base = {"kind": "worker", "time_s": time_s, "slot": slot, "incarnation": 1, "role": "colocated"}
    return {**base, "zone": "dedicated", "activity": "x", "event": event, "version": version, **more}


def step(number: int, time_s: float, reward: float, **more: Any) -> dict[str, Any]:
    base = {"kind": "step", "step": number, "time_s": time_s, "seconds": 2.0, "reward_mean": reward}
    counts = {"tokens_generated": 300, "tokens_trained": 100, "max_staleness": 1, "mean_staleness": 0.5}
    return {**base, **counts, "max_logprob_gap": 1e-6, "logprob_gap_tokens": 10, **more}


LINES = [
    worker(100.0, "starting"),
    {"kind": "training", "time_s": 100.0, "activity": "starting"},
    worker(102.0, "serving", 0),
    {"kind": "training", "time_s": 102.0, "activity": "idle"},
    {"kind": "evaluation", "time_s": 103.0, "round": 0, "step": 0, "reward_mean": 0.1, "tasks": 10},
    {"kind": "training", "time_s": 104.0, "activity": "training"},
    step(0, 105.0, 0.2),
    worker(105.5, "gone", reason="killed by <signal 9>"),
    {"kind": "note", "time_s": 105.6, "text": "hello"},
    worker(106.0, "starting", incarnation=2),
    worker(107.0, "serving", 1, incarnation=2),
    step(1, 108.0, 0.6),
    {"kind": "evaluation", "time_s": 109.0, "round": 1, "step": 2, "reward_mean": 0.9, "tasks": 10},
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[run]\nseed = 0  # <b>\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "trajectories.jsonl").write_text(
        '{"outcome": "done"}\n{"outcome": "done", "discarded": "lineage"}\n'
    )
    (tmp_path / "summary.json").write_text('{"steps": 2, "error": ""}')
    return tmp_path


def test_report_of_a_whole_run_is_one_offline_file(run_dir: Path) -> None:
    html = build(run_dir).read_text()
    for title in (
        "Reward",
        "Throughput",
        "Staleness",
        "Largest log-prob gap",
        "Workers and training over time",
    ):
        assert f'"text":"{title}' in html
    assert "src=" not in html.split("</script>", 1)[1], "everything is inline"
    assert "# &lt;b&gt;" in html
    assert "discarded: lineage" in html
    assert not list(run_dir.glob("*.tmp"))


def test_headline_numbers(run_dir: Path) -> None:
    numbers = dict(headlines(read_run(run_dir)))
    assert numbers["steps trained"] == "2"
    assert numbers["sampled reward"] == "0.20 → 0.60"
    assert numbers["greedy reward, held out"] == "0.10 → 0.90"
    assert numbers["tokens / s, generated + trained"] == "200"
    assert numbers["workers lost"] == "1"
    assert numbers["duration"] == "9.0 s"


def test_timeline_has_a_gap_where_a_worker_was_gone(run_dir: Path) -> None:
    run = read_run(run_dir)
    spans = [
        (bar.state, bar.start_s, bar.end_s, bar.version)
        for bar in timeline.bars(run)
        if bar.row == "worker 0"
    ]
    assert spans == [
        ("starting", 0.0, 2.0, ""),
        ("active (colocated)", 2.0, 5.5, "0"),
        ("starting", 6.0, 7.0, ""),
        ("active (colocated)", 7.0, 9.0, "1"),
    ]
    assert [(mark.time_s, mark.label) for mark in timeline.losses(run)] == [(5.5, "killed by <signal 9>")]
    assert [mark.label for mark in timeline.version_changes(run)] == ["0", "1"]


def test_a_step_trained_again_replaces_the_discarded_one(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(1, 111.0, 0.7, lineage=1)) + "\n")
    assert [line["reward_mean"] for line in read_run(run_dir).steps] == [0.2, 0.7]


def test_run_cut_short_still_gives_a_report(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    run = read_run(run_dir)
    assert run.torn_lines == 1
    html = build(run_dir).read_text()
    assert "no summary.json" in html
    assert "1 incomplete line" in html


def test_report_of_nothing(tmp_path: Path) -> None:
    assert "Nothing was recorded" in build(tmp_path).read_text()


def test_me_01_times_never_fall_when_the_clock_starts_again() -> None:
    lines = [{"time_s": 50.0}, {"time_s": 60.0}, {"time_s": 3.0}, {"time_s": 5.0}, {"time_s": 4.9}, {}]
    assert [line["time_s"] for line in straighten(lines)] == [0.0, 10.0, 10.0, 12.0, 12.0, 12.0]
