"""The report of a whole run, of one cut short, and of nothing."""

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest

from pearl.report import elasticity, svg, timeline, timeline_events
from pearl.report.report import build, headlines
from pearl.report.run_data import read_run, straighten
from pearl.report.terminal_summary import closing_lines


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
        "Timeline",
    ):
        assert f'aria-label="{title}' in html
    for link in ("src=", "href=", "url("):
        assert link not in html, "everything is inline"
    assert "# &lt;b&gt;" in html
    assert "discarded: lineage" in html
    assert not list(run_dir.glob("*.tmp"))


def drawing(html: str, title: str) -> Element:
    """The plot called ``title``, which is well-formed."""
    start = html.rindex("<svg", 0, html.index(f'aria-label="{title}'))
    return fromstring(html[start : html.index("</svg>", start) + len("</svg>")])


def test_first_and_last_bars_of_the_throughput_are_whole(run_dir: Path) -> None:
    plot = drawing(build(run_dir).read_text(), "Throughput")
    bars = [bar for bar in plot.iter("rect") if bar.find("title") is not None]
    assert len(bars) == 4, "two steps, generated and trained"
    lefts = [float(bar.attrib["x"]) for bar in bars]
    assert min(lefts) >= svg.LEFT
    assert max(left + float(bar.attrib["width"]) for left, bar in zip(lefts, bars, strict=True)) <= (
        svg.WIDTH - svg.RIGHT
    )
    assert all(float(bar.attrib["height"]) > 10 for bar in bars)


def test_the_page_of_a_small_run_is_small(run_dir: Path) -> None:
    assert build(run_dir).stat().st_size < 30_000


def test_the_page_scales_to_ten_thousand_trajectories_and_a_thousand_steps(tmp_path: Path) -> None:
    lines = [worker(0.0, "starting", slot=slot) for slot in range(8)]
    for number in range(1000):
        lines.append(step(number, 2.0 * number + 2, 0.5))
        lines += [worker(2.0 * number + 2, "updating", slot=slot) for slot in range(8)]
        lines += [worker(2.0 * number + 2.2, "serving", number, slot=slot) for slot in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "trajectories.jsonl").write_text('{"outcome": "done"}\n' * 10_000)
    page = build(tmp_path)
    assert "10,000" in page.read_text()
    assert page.stat().st_size < 6_000_000


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
    assert [(mark.time_s, mark.label) for mark in timeline_events.losses(run)] == [
        (5.5, "killed by <signal 9>")
    ]
    assert [mark.label for mark in timeline_events.version_changes(run)] == ["0", "1"]


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


@pytest.mark.scenario("ME-01")
def test_times_never_fall_when_the_clock_starts_again() -> None:
    lines = [{"time_s": 50.0}, {"time_s": 60.0}, {"time_s": 3.0}, {"time_s": 5.0}, {"time_s": 4.9}, {}]
    assert [line["time_s"] for line in straighten(lines)] == [0.0, 10.0, 10.0, 12.0, 12.0, 12.0]


# elasticity


def training(time_s: float, activity: str, **more: Any) -> dict[str, Any]:
    return {"kind": "training", "time_s": time_s, "activity": activity, "step": 0, **more}


def gpus(time_s: float, event: str, names: str, **more: Any) -> dict[str, Any]:
    return {"kind": "gpus", "time_s": time_s, "event": event, "gpus": names, **more}


def handoff(time_s: float, event: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"kind": "handoff", "time_s": time_s, "event": event, "seconds": seconds, **more}


OVERLAP: dict[str, Any] = {"slot": 1, "zone": "overlap", "gpus": "local/0"}
ELASTIC_LINES = [
    training(0.0, "starting"),
    worker(0.0, "starting", slot=0, gpus="local/2,local/10"),
    worker(0.5, "starting", **OVERLAP),
    worker(1.0, "asleep", **OVERLAP),
    worker(1.0, "serving", 0, gpus="local/2,local/10"),
    training(1.0, "idle"),
    gpus(2.0, "arrived", "local/11"),
    worker(2.0, "starting", slot=2, gpus="local/11"),
    training(2.0, "offloading"),
    training(2.5, "lent", part_backup=0.3, part_release=0.1),
    worker(2.5, "activating", **OVERLAP),
    worker(3.0, "serving", 0, **OVERLAP),
    handoff(3.0, "borrow", 1.0),
    worker(4.0, "serving", 0, slot=2, gpus="local/11"),
    handoff(4.0, "expansion", 2.0, part_preparation=1.5, part_finalization=0.5),
    worker(5.0, "releasing", **OVERLAP),
    worker(5.2, "asleep", **OVERLAP),
    training(5.2, "restoring"),
    handoff(5.5, "return", 0.5, part_restore=0.2),
    training(5.5, "training"),
    gpus(6.0, "reclaimed", "local/11", grace_s=5.0, reason="asked"),
    {"kind": "plan", "time_s": 6.0, "urgency": "mandatory", "remove": "2", "reason": "reclaimed"},
    worker(6.0, "leaving", slot=2, gpus="local/11"),
    worker(6.1, "stopping", slot=2, gpus="local/11"),
    worker(6.5, "gone", slot=2, gpus="local/11", reason="reclaimed"),
    gpus(6.5, "returned", "local/11", seconds=0.5, on_time=True),
    {"kind": "decision", "time_s": 7.0, "target": "3C", "reason": "it gains", "predicted_seconds": 1.23456},
    {"kind": "gate", "time_s": 7.5, "gate": "borrow", "allowed": False, "gain_s": 0.25, "note": None},
    {"kind": "profile", "time_s": 7.6, "predicted_s": 1.5, "measured_s": 2.0},
    step(0, 8.0, 0.2),
]


@pytest.fixture
def elastic_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ELASTIC_LINES))
    return tmp_path


def test_rows_are_gpus_with_those_who_work_on_them(elastic_dir: Path) -> None:
    assert timeline.rows(read_run(elastic_dir)) == [
        "local/0 · training, worker 1",
        "local/2 · worker 0",
        "local/10 · worker 0",
        "local/11 · worker 2",
    ]


def test_a_lent_gpu_shows_training_and_worker_in_turn(elastic_dir: Path) -> None:
    run = read_run(elastic_dir)
    row = "local/0 · training, worker 1"
    worked = [(bar.state, bar.start_s, bar.end_s) for bar in timeline.bars(run) if bar.row == row]
    assert worked == [
        ("starting", 0.5, 1.0),
        ("activating", 2.5, 3.0),
        ("active (colocated)", 3.0, 5.0),
        ("releasing", 5.0, 5.2),
    ]
    trained = [(bar.state, bar.start_s) for bar in timeline.training_bars(run)]
    assert trained == [
        ("training starting", 0.0),
        ("training idle", 1.0),
        ("offloading", 2.0),
        ("lent", 2.5),
        ("restoring", 5.2),
        ("training", 5.5),
    ]
    assert [(mark.row, mark.time_s) for mark in timeline_events.handoffs(run, "borrow")] == [(row, 3.0)]
    assert [(mark.row, mark.time_s) for mark in timeline_events.handoffs(run, "return")] == [(row, 5.5)]
    assert [mark.time_s for mark in timeline_events.publications(run)] == [8.0]


def test_a_preemptible_gpu_is_there_from_arrival_to_return(elastic_dir: Path) -> None:
    run = read_run(elastic_dir)
    spans = [(bar.state, bar.start_s, bar.end_s) for bar in timeline.presence_bars(run)]
    assert spans == [("GPU there", 2.0, 6.0), ("GPU reclaimed", 6.0, 6.5)]
    assert [mark.label for mark in timeline_events.capacity_changes(run, "reclaimed")] == ["grace 5 s"]
    assert [mark.label for mark in timeline_events.capacity_changes(run, "returned")] == ["after 0.50 s"]


def test_a_worker_that_left_as_it_should_is_not_lost(elastic_dir: Path) -> None:
    run = read_run(elastic_dir)
    assert timeline_events.losses(run) == []
    assert [(mark.row, mark.label) for mark in timeline_events.stops(run)] == [
        ("local/11 · worker 2", "reclaimed")
    ]
    assert dict(headlines(run))["workers lost"] == "0"


def test_tables_of_elasticity(elastic_dir: Path) -> None:
    run = read_run(elastic_dir)
    assert elasticity.costs(run) == [
        ("GPUs arrived", "1", "", ""),
        ("GPUs reclaimed", "1", "", ""),
        ("GPUs given back", "1", "0.500", "all in time"),
        ("training GPUs lent to rollout (activation)", "1", "1.000", ""),
        ("training GPUs returned (deactivation)", "1", "0.500", "restore 0.200 s"),
        ("expansion", "1", "2.000", "preparation 1.500 s, finalization 0.500 s"),
        ("training state off its GPUs", "1", "", "backup 0.300 s, release 0.100 s"),
        ("mandatory plans", "1", "", ""),
    ]
    assert elasticity.decisions(run) == [
        ("7.0 s", "target 3C, reason it gains, predicted seconds 1.235"),
        ("7.5 s", "gate borrow, allowed no, gain s 0.25"),
    ]
    html = build(elastic_dir).read_text()
    assert "<summary>Elasticity</summary>" in html
    assert "training GPUs lent" in html
    assert "Makespan of the rollout" in html


def test_a_run_without_elasticity_has_no_section_for_it(run_dir: Path) -> None:
    html = build(run_dir).read_text()
    assert "<summary>Elasticity</summary>" not in html
    assert timeline.rows(read_run(run_dir)) == ["worker 0", "training"]


def test_odd_lines_of_elasticity_break_nothing(elastic_dir: Path) -> None:
    odd = [
        gpus(9.0, "lost", ""),
        {"kind": "gpus", "time_s": 9.0},
        {"kind": "gpus", "time_s": 9.0, "event": "returned", "gpus": ["x"], "seconds": None},
        {"kind": "handoff", "time_s": 9.0, "event": "borrow", "seconds": None, "part_x": None},
        {"kind": "worker", "time_s": 9.0, "slot": 5, "event": None, "gpus": 3},
        {"kind": "plan", "time_s": 9.0},
        {"kind": "decision", "time_s": 9.0},
        training(9.5, "lost", reason="died"),
    ]
    with (elastic_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in odd)
    build(elastic_dir)
    assert [mark.label for mark in timeline_events.losses(read_run(elastic_dir))] == ["died"]


def test_closing_lines_tell_of_elasticity_and_leave_out_what_is_not_known(tmp_path: Path) -> None:
    summary: dict[str, Any] = {"steps": 3, "seconds": 4.2, "eval_reward_start": None, "max_staleness": 1}
    elastic = {"arrivals": 2, "reclaims": 1, "borrows": 3, "returns": 1, "activation_seconds_mean": 0.5}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, **elastic}))
    assert closing_lines(tmp_path) == [
        "3 steps in 4 s",
        "0 trajectories trained, 0 tokens generated, staleness at most 1",
        "preemptible GPUs: 2 arrived, 1 reclaimed; training GPUs lent 3 times (0.50 s each), returned once",
    ]


def test_a_run_of_the_version_before_is_shown_with_its_own_words(tmp_path: Path) -> None:
    lines = [worker(0.0, "ready"), worker(1.0, "proven"), worker(3.0, "serving", 0), step(0, 5.0, 0.5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "trajectories.jsonl").write_text('{"outcome": "done", "tokens_lost": 0}\n')
    (tmp_path / "journal.msgpack").mkdir()
    bars = timeline.bars(read_run(tmp_path))
    assert [(bar.state, bar.end_s) for bar in bars] == [
        ("waiting for weights", 1.0),
        ("waiting for the others", 3.0),
        ("active (colocated)", 5.0),
    ]
    assert "How the trajectories ended" in build(tmp_path).read_text()


def test_samples_are_shown_and_bounded(run_dir: Path) -> None:
    parts = [{"kind": "generated", "turn": 0, "tokens": 9, "text": "<b>said</b>" + "x" * 60_000}]
    sample = {"step": 1, "prompt": 2, "reward": 0.5, "outcome": "done", "parts": parts}
    lines = [json.dumps({**sample, "trajectory": number}) for number in range(150)]
    (run_dir / "samples.jsonl").write_text("\n".join(lines))
    html = build(run_dir).read_text()
    assert "trajectory 149: step 1, prompt 2, reward 0.5, done" in html
    assert "&lt;b&gt;said" in html
    assert len(html) < 3_000_000
    assert "older ones: pearl show" in html
