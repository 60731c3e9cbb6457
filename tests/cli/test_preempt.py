"""``pearl preempt`` against a server that answers as the coordinator does; the player of traces on a clock of ours."""

import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_coordinator import LiveCoordinator

from pearl.cli import coordinator_client, main
from pearl.cli.player import Player
from pearl.runtime import run_registry
from pearl.runtime.errors import RemoteError
from pearl.types.messages.control import Preempt, PreemptReply
from pearl.types.trace import TraceEvent


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def trace(tmp_path: Path, *entries: dict[str, Any]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def test_reclaim_and_arrive_say_what_happened(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveCoordinator(run_dir, dict) as coordinator:
        assert main(["preempt", "reclaim", "--gpus", "local/3", "--grace", "5"]) == 0
        assert main(["preempt", "arrive", "--gpus", "2", "--run-dir", str(run_dir)]) == 0
        assert main(["preempt", "reclaim", "--gpus", "a/1, b/GPU-2"]) == 0
    assert coordinator.preempted == [
        Preempt("reclaim", ("local/3",), 0, 5.0),
        Preempt("arrive", (), 2, 30.0),
        Preempt("reclaim", ("a/1", "b/GPU-2"), 0, 30.0),
    ]
    assert capsys.readouterr().out.splitlines() == [
        "reclaimed local/3, to be back within 5 s",
        "arrived local/0, local/1",
        "reclaimed a/1, b/GPU-2, to be back within 30 s",
    ]


def test_of_several_live_runs_one_has_to_be_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveCoordinator(run_dir, dict) as coordinator:
        (run,) = run_registry.live_runs()
        monkeypatch.setattr(
            run_registry, "live_runs", lambda: [run, msgspec.structs.replace(run, run_dir="/other")]
        )
        assert main(["preempt", "reclaim", "--gpus", "1"]) == 2
        assert f"say which one with --run-dir: {run_dir}, /other" in capsys.readouterr().err
        assert coordinator.preempted == []


def test_what_the_run_refuses_is_exit_2(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveCoordinator(run_dir, dict):
        assert main(["preempt", "reclaim", "--gpus", "nowhere/1"]) == 2
    assert capsys.readouterr().err == "error: refused: nowhere/1 is no GPU of this run\n"


def test_no_run_and_a_silent_one_are_exit_1(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preempt", "arrive", "--gpus", "1"]) == 1
    assert "no live run" in capsys.readouterr().err
    assert main(["preempt", "replay", trace(tmp_path, {"time_s": 0, "arrive": 1})]) == 1
    assert "no live run" in capsys.readouterr().err
    monkeypatch.setattr(coordinator_client, "DEADLINE_S", 0.3)
    with LiveCoordinator(run_dir, None):
        assert main(["preempt", "replay", trace(tmp_path, {"time_s": 0, "arrive": 1})]) == 1
    assert "no answer from tcp://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reclaim", "--gpus", "0"], "--gpus 0: give a whole number from 1 to 65536, or ids"),
        (["reclaim", "--gpus", ""], "is not the id of a GPU"),
        (["reclaim", "--gpus", "3,4"], '"3" is not the id of a GPU; give ids like local/3,local/4'),
        (["reclaim", "--gpus=-1"], "--gpus -1: give a whole number from 1"),
        (["reclaim", "--gpus", "a/1,a/1"], "names a GPU twice"),
        (["reclaim", "--gpus", "1", "--grace", "-1"], "--grace: -1: give seconds, from 0 to 86400"),
        (["reclaim", "--gpus", "1", "--grace", "nan"], "--grace: nan: give seconds"),
        (["replay", "absent.csv"], "absent.csv: cannot be read"),
        (["replay", "steps.jsonl", "--speed", "2"], "goes by the run's steps"),
        (["replay", "steps.jsonl", "--speed", "0"], "--speed: 0: give a number, from 0.001"),
        (["replay", "steps.jsonl", "--max-gpus", "0"], "--max-gpus: 0: give a whole number from 1"),
        (["replay", "broken.csv"], 'broken.csv, line 2: "x" is neither add nor remove'),
    ],
)
def test_wrong_asking_is_exit_2_before_any_run_is_looked_for(
    words: list[str],
    said: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run_dir)
    Path("steps.jsonl").write_text('{"step": 1, "arrive": 1}')
    Path("broken.csv").write_text("0,add,a\n1,x,a\n")
    if words[1] == "--gpus":
        words = [words[0], f"--gpus={words[2]}", *words[3:]]
    assert main(["preempt", *words]) == 2
    assert said in capsys.readouterr().err


def test_replay_plays_a_trace_into_the_run(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(
        tmp_path,
        {"time_s": 0, "arrive": 5},
        {"time_s": 6, "reclaim": ["local/1"], "grace_s": 2},
    )
    gpus = [{"gpu": f"local/{number}", "zone": "preemptible"} for number in (1, 2)]
    with LiveCoordinator(run_dir, lambda: {"step": 0, "gpus": gpus}) as coordinator:
        assert main(["preempt", "replay", path, "--speed", "60"]) == 2
        assert "--max-gpus 2 plays what fits" in capsys.readouterr().err
        assert coordinator.preempted == []
        assert main(["preempt", "replay", path, "--speed", "60", "--max-gpus", "2"]) == 0
    assert coordinator.preempted == [
        Preempt("arrive", (), 2, 30.0),
        Preempt("reclaim", ("local/1",), 0, 2.0),
    ]
    assert capsys.readouterr().out.splitlines() == [
        f"playing {path}, 2 event(s) over 0.1 s, into {run_dir}",
        "[1/2]      0.0 s: arrived local/0, local/1; next in 0.1 s",
        "[2/2]      0.1 s: reclaimed local/1, to be back within 2 s",
        "2 of 2 event(s) played",
    ]


def test_replay_says_when_the_run_ends_before_the_trace(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = iter((0, 1, 2))

    def status() -> dict[str, Any]:
        step = next(steps)
        if step == 2:
            coordinator.end()
        return {"step": step}

    path = trace(tmp_path, {"step": 1, "arrive": 1}, {"step": 9, "reclaim": 1})
    with LiveCoordinator(run_dir, status) as coordinator:
        assert main(["preempt", "replay", path]) == 1
    printed = capsys.readouterr()
    assert "[1/2] step    1: arrived local/0; next at step 9" in printed.out
    assert printed.err.splitlines() == [
        f"error: {run_dir}: the run has ended: the run is over",
        "1 of 2 event(s) played",
    ]


def test_ctrl_c_stops_a_replay_with_130(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, {"step": 9, "arrive": 1})

    def status() -> dict[str, Any]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return {"step": 0}

    with LiveCoordinator(run_dir, status):
        assert main(["preempt", "replay", path]) == 130
    assert capsys.readouterr().err == "stopped; 0 of 1 event(s) played\n"


class JumpingClock:
    """Sleeping is passing."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s

    def call_later(self, delay_s: float, callback: object) -> Any:
        raise NotImplementedError

    async def sleep(self, delay_s: float) -> None:
        self.time_s += delay_s


class FakeRun:
    """Takes 3 s for every preemption; its step is the time."""

    def __init__(self, clock: JumpingClock) -> None:
        self.clock = clock
        self.played: list[tuple[float, Preempt]] = []
        self.gpus: list[dict[str, Any]] | None = None

    async def status(self) -> bytes:
        status: dict[str, Any] = {"step": int(self.clock.time_s - 100.0)}
        return msgspec.json.encode(status if self.gpus is None else {**status, "gpus": self.gpus})

    async def preempt(self, message: Preempt) -> PreemptReply:
        self.played.append((self.clock.time_s - 100.0, message))
        self.clock.time_s += 3.0
        if message.count == 7:
            raise RemoteError("only 2 are there", "ValueError")
        return PreemptReply(message.gpus or ("a/0",) * message.count)


async def play(events: Sequence[TraceEvent]) -> tuple[int, list[float], str]:
    clock = JumpingClock()
    run, player = FakeRun(clock), Player(events, clock)
    code = await player.play(run)
    return code, [time_s for time_s, _ in run.played], player.progress


async def test_times_count_from_the_beginning_however_long_an_event_takes() -> None:
    events = [TraceEvent("arrive", at_s=time_s, count=1) for time_s in (0.0, 1.0, 10.0)]
    assert await play(events) == (0, [0.0, 3.0, 10.0], "3 of 3 event(s) played")


async def test_events_by_step_wait_for_the_run() -> None:
    events = [TraceEvent("arrive", at_step=step, count=1) for step in (2, 4, 9)]
    assert await play(events) == (0, [2.0, 5.0, 9.0], "3 of 3 event(s) played")


async def test_a_refused_event_is_said_and_the_next_one_comes(capsys: pytest.CaptureFixture[str]) -> None:
    events = [TraceEvent("reclaim", at_s=0.0, count=7), TraceEvent("arrive", at_s=5.0, count=1)]
    assert await play(events) == (1, [0.0, 5.0], "2 of 2 event(s) played, 1 of them refused")
    refusal = "[1/2]      0.0 s: the reclaim of 7 GPU(s) is refused: only 2 are there\n"
    assert capsys.readouterr().err == refusal


async def test_a_trace_of_unknown_gpus_is_refused_before_its_first_event() -> None:
    run = FakeRun(JumpingClock())
    run.gpus = [{"gpu": "a/1", "zone": "preemptible"}, {"gpu": "a/0", "zone": "dedicated"}]
    player = Player([TraceEvent("reclaim", at_s=0.0, gpus=("a/0",))], run.clock)
    with pytest.raises(ValueError, match="names a/0, but the run's preemptible GPUs are: a/1"):
        await player.play(run)
    assert run.played == []
