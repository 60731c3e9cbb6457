"""The trajectories of a run as text: filters, one, two beside each other, and what is said of missing ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pearl.cli import main
from pearl.config import resolved_json, resolved_toml
from pearl.envs.bugfix.tokenizer import encode
from pearl.runtime.token_store import TokenStore
from pearl.types.config import Config, EnvironmentConfig
from pearl.types.trajectory import VersionRun
from pearl.types.weights import Version

RUN = VersionRun(Version(0, 3), 2, Version(0, 3))


def packed(text: str) -> bytes:
    return np.array(encode(text), "<i4").tobytes()


def record(number: int, **more: Any) -> dict[str, Any]:
    turn = {"new_prompt_tokens": 3, "generated_tokens": 2, "retained_tokens": 2, "worker": 1}
    return {
        "prompt": number // 2,
        "group": number // 2,
        "trajectory": number,
        "cohort": number // 4,
        "lineage": 0,
        "trained_step": number // 4,
        "start_version": [0, 3],
        "end_version": [0, 4],
        "reward": float(number % 2),
        "outcome": "done",
        "turns": [{**turn, "versions": [[[0, 3], 2, [0, 3]]]}],
        **more,
    }


def make_run(run_dir: Path, records: list[dict[str, Any]], name: str = "bugfix") -> Path:
    run_dir.mkdir()
    config = Config(environment=EnvironmentConfig(name=name))
    (run_dir / "config.toml").write_text(resolved_toml(config))
    (run_dir / "config.json").write_text(resolved_json(config))
    (run_dir / "trajectories.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(records))
    store = TokenStore(run_dir / "tokens")
    for number in (6, 7):
        store.append(number, "prompt", 0, packed("<task> L1 a"))
        store.append(number, "generated", 0, packed("TEST <end>"), bytes(8), (RUN,))
        store.append(number, "observation", 0, packed("<tool> fail"))
    store.close()
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "120")
    records = [record(number) for number in range(8)]
    records[5] |= {"outcome": "expired"}
    return make_run(tmp_path / "run", records)


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    assert main(["show", *words]) == 0
    return [int(row.split()[0]) for row in capsys.readouterr().out.splitlines()[1:-1]]


def test_the_list_has_filters(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(run_dir)
    assert listed(capsys, directory) == list(range(8))
    assert listed(capsys, directory, "--limit", "3") == [5, 6, 7]
    assert listed(capsys, directory, "--step", "1", "--reward", "1") == [5, 7]
    assert listed(capsys, directory, "--reward", "..0.5", "--prompt", "3") == [6]
    assert (
        listed(capsys, directory, "--outcome", "masked")
        == [5]
        == listed(capsys, directory, "--outcome", "expired")
    )


def test_a_trajectory_is_text_with_versions(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run_dir), "7"]) == 0
    said = capsys.readouterr().out
    assert "reward 1  done  versions version 3-4" in said
    assert "--- prompt, turn 0, 3 tokens\n<task> L1 a" in said
    assert "--- generated, turn 0, 2 tokens, version 3, worker 1\nTEST <end>" in said
    assert "<tool> fail" in said
    assert main(["show", str(run_dir), "7", "--ids"]) == 0
    assert f"ids {' '.join(map(str, encode('TEST <end>')))}" in capsys.readouterr().out


def test_siblings_are_beside_each_other(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["show", str(run_dir), "6", "--beside"]) == 0
    said = capsys.readouterr().out
    assert any(row.startswith("reward 0 ") and "| reward 1 " in row for row in said.splitlines())
    assert max(map(len, said.splitlines())) <= 120
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["show", str(run_dir), "6", "--beside", "7"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 30
    assert "=" * 30 in said, "too narrow for columns"


def test_what_is_not_there_is_a_usage_error_that_says_what_is(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run_dir), "9"]) == 2
    assert "it has 8 from 0 to 7, near it 3, 4, 5, 6, 7" in capsys.readouterr().err
    assert main(["show", str(run_dir), "6", "--beside", "6"]) == 2
    assert main(["show", str(run_dir), "6", "--step", "1"]) == 2
    assert main(["show", str(run_dir), "--reward", "1..0"]) == 2
    assert main(["show", str(run_dir / "tokens")]) == 2
    capsys.readouterr()
    assert main(["show", str(run_dir), "2"]) == 0
    assert "not kept any more" in capsys.readouterr().out


def test_ids_are_shown_as_numbers_where_the_environment_cannot_decode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", [record(6)], "emulated")
    assert main(["show", str(tmp_path / "run"), "6"]) == 0
    said = capsys.readouterr().out
    assert "has no decode" in said
    assert f"ids {' '.join(map(str, encode('TEST <end>')))}" in said


def test_a_sample_stands_in_for_tokens_that_are_gone_and_steers_no_terminal(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = {
        "kind": "generated",
        "turn": 0,
        "tokens": 2,
        "text": 'x\x1b[2J<tool_call>{"name": "run"}</tool_call>',
    }
    sample = {**record(2), "step": 0, "parts": [part]}
    (run_dir / "samples.jsonl").write_bytes(msgspec.json.encode(sample))
    assert main(["show", str(run_dir), "2"]) == 0
    said = capsys.readouterr().out
    assert "from samples.jsonl" in said
    assert r"x\x1b[2J" in said
    assert "\x1b" not in said
    assert "tool call run()" in said


def test_ten_thousand_trajectories_open_at_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", [record(number) for number in range(10_000)])
    code = "import sys; from pearl.cli import main; code = main(sys.argv[1:]); import resource; " + (
        "r = resource.getrusage(resource.RUSAGE_SELF); print(r.ru_utime + r.ru_stime, file=sys.stderr); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    for words in ([], ["7"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "show", str(run_dir), *words],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "100"},
        )
        seconds, imported = done.stderr.splitlines()
        assert float(seconds) < 3
        assert imported == "[]"
        assert len(done.stdout) < 100_000


def test_a_reader_that_leaves_is_no_traceback(run_dir: Path) -> None:
    command = [sys.executable, "-m", "pearl", "show", str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.wait(timeout=60)
    assert process.stderr.read() == b""
    process.stderr.close()
