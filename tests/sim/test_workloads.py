"""Workloads: real trajectories, profiles and runs are read, and refused with a reason when they cannot be."""

import gzip
import json
import statistics
from pathlib import Path

import msgspec
import pytest

from pearl.config import ConfigError
from pearl.sim import workload_files
from pearl.sim.workload import EnvLatency, Script
from pearl.types.profile import Platform, Profile, Workload


def capped(script: Script, limit: int = 32768) -> tuple[int, int, int]:
    """(turns, generated tokens, all tokens) with the context cut at ``limit``."""
    tokens, generated, turns = script.prompt_tokens, 0, 0
    for turn in script.turns:
        turns += 1
        made = min(turn.generated_tokens, limit - tokens)
        generated += made
        tokens += made
        if tokens >= limit:
            break
        tokens += turn.observation_tokens
        if tokens >= limit:
            break
    return turns, generated, min(tokens, limit)


def test_swebench_has_the_published_shape() -> None:
    """Recorded: 36.9 turns of 273 tokens, 23.5K tokens a trajectory, at 32K of context."""
    workload = workload_files.load("swebench", 0)
    seen = [capped(workload.script(i // 16, i)) for i in range(16 * 120)]
    turns = statistics.fmean(t for t, _, _ in seen)
    assert turns == pytest.approx(36.9, rel=0.06)
    assert statistics.fmean(g for _, g, _ in seen) / turns == pytest.approx(273, rel=0.05)
    assert statistics.fmean(tokens for _, _, tokens in seen) == pytest.approx(23_500, rel=0.05)


def test_members_of_a_group_share_the_prompt_and_differ_in_their_turns() -> None:
    workload = workload_files.load("swebench", 0)
    scripts = [workload.script(3, 48 + i) for i in range(16)]
    assert len({script.prompt_tokens for script in scripts}) == 1
    assert len({len(script.turns) for script in scripts}) > 4
    assert workload.script(3, 48) == scripts[0]
    assert workload_files.load("swebench", 1).script(3, 48) != scripts[0]


def test_environments_are_quick_with_a_heavy_tail() -> None:
    workload = workload_files.load("swebench", 0)
    seconds = sorted(t.env_seconds for i in range(200) for t in workload.script(i, i).turns)
    assert statistics.fmean(seconds) == pytest.approx(EnvLatency().mean, rel=0.1)
    assert seconds[len(seconds) // 2] < 1.0
    assert seconds[len(seconds) * 99 // 100] > 20.0


def test_a_profile_gives_its_means(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    workload = Workload(
        batch_size=64,
        num_turns=60,
        turn_input_tokens=500,
        turn_output_tokens=200,
        bubble_ratio=1.0,
        env_seconds=120,
    )
    platform = Platform(**dict.fromkeys(Platform.__struct_fields__, 1.0))
    path.write_bytes(msgspec.json.encode(Profile(workload, platform)))
    loaded = workload_files.load(str(path), 0)
    batches = [[loaded.script(b * 4 + i // 16, b * 64 + i) for i in range(64)] for b in range(40)]
    longest = statistics.fmean(max(len(s.turns) for s in batch) for batch in batches)
    assert longest == pytest.approx(60, rel=0.15)
    turns = [turn for batch in batches for script in batch for turn in script.turns]
    assert statistics.fmean(t.generated_tokens for t in turns) == pytest.approx(200, rel=0.05)
    assert statistics.fmean(t.observation_tokens for t in turns) == pytest.approx(500, rel=0.05)
    assert statistics.fmean(t.env_seconds for t in turns) == pytest.approx(2.0, rel=0.05)


def test_a_run_is_replayed_trajectory_by_trajectory(tmp_path: Path) -> None:
    turns = [
        {"new_prompt_tokens": 30, "generated_tokens": 5, "env_seconds": 0.5},
        {"new_prompt_tokens": 7, "generated_tokens": 6, "env_seconds": 0.25},
    ]
    lines = [
        {"trajectory": 4, "trained_step": 0, "turns": turns},
        {"trajectory": 5, "trained_step": None, "turns": turns[:1]},
        {"trajectory": 6, "trained_step": 0, "turns": turns, "reset_seconds": 0.125},
    ]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(map(json.dumps, lines)))
    script = workload_files.load(str(tmp_path), 0).script(0, 4)
    assert script.prompt_tokens == 30
    assert [(t.generated_tokens, t.observation_tokens, t.env_seconds) for t in script.turns] == [
        (5, 7, 0.5),
        (6, 0, 0.25),
    ]
    assert script.reset_seconds == 0.0
    opened = workload_files.load(str(tmp_path), 0).script(0, 6)
    assert opened.reset_seconds == 0.125
    assert [turn.env_seconds for turn in opened.turns] == [0.375, 0.25]


TRAINED = (
    b'{"trajectory": 4, "trained_step": 0, '
    b'"turns": [{"new_prompt_tokens": 30, "generated_tokens": 5, "env_seconds": 0.5}]}'
)


@pytest.mark.parametrize(
    "content", [TRAINED, b"\xef\xbb\xbf" + TRAINED, TRAINED + b"\r\n", b"{}\r\n" + TRAINED + b"\r\n\r\n"]
)
def test_a_run_is_the_same_however_its_file_was_saved(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trajectories.jsonl").write_bytes(content)
    assert workload_files.load(str(tmp_path), 0).script(0, 4).prompt_tokens == 30


def test_a_huge_workload_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_files, "MAX_BYTES", 1 << 20)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b" " * (2 << 20), mtime=0))
    with pytest.raises(ConfigError, match="is larger than 1 MiB"):
        workload_files.load(str(path), 0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json.gz", b"not gzip", "holds no recorded trajectories"),
        ("a.json.gz", gzip.compress(b"[]", mtime=0), "no trajectory with a turn"),
        (
            "a.json.gz",
            gzip.compress(b'[{"id": "x", "prompt0": 5, "turns": [{"out": "many"}]}]', mtime=0),
            "out",
        ),
        (
            "a.json.gz",
            gzip.compress(b'[{"id": "x", "prompt0": 0, "turns": [{"out": 1}]}]', mtime=0),
            "trajectory x",
        ),
        ("a.json", b"{}", "is no profile"),
        ("trajectories.jsonl", b"{}\n{", "line 2"),
        ("trajectories.jsonl", b"{}", "no trained trajectory"),
        ("trajectories.jsonl", b"", "no trained trajectory"),
        (
            "trajectories.jsonl",
            b'{"trajectory": 1, "trained_step": 0, "turns": [{}]}',
            "line 1: trajectory 1: Object missing required field `new_prompt_tokens`",
        ),
        (
            "trajectories.jsonl",
            b"{}\r\n\r\n" + TRAINED.replace(b"0.5", b"-0.5"),
            "line 3: trajectory 4: env_seconds = -0.5: must be 0 or more",
        ),
        (
            "trajectories.jsonl",
            TRAINED.replace(b'"turns"', b'"reset_seconds": 0.75, "turns"'),
            r"reset_seconds = 0.75: must be from 0 to the first turn's env_seconds \(0.5\)",
        ),
        ("trajectories.jsonl", TRAINED.replace(b"30", b"30.5"), "line 1: trajectory 4: Expected `int`"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        workload_files.load(str(path), 0)


def test_a_name_that_is_none_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean swebench"):
        workload_files.load("swe-bench", 0)
