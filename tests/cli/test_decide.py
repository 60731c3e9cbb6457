"""``pearl decide``: the table, the JSON, and what it refuses."""

import json
import math
from pathlib import Path

import pytest

from pearl.cli import main

PROFILES = Path(__file__).parents[2] / "launch" / "profiles"
QWEN3_8B = str(PROFILES / "qwen3-8b.json")


def test_json_has_every_allocation_and_only_finite_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", "--profile", QWEN3_8B, "--workers", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert answer["target"] == "3P5D"
    assert [c["allocation"] for c in answer["candidates"]] == ["8C"] + [f"{p}P{8 - p}D" for p in range(1, 8)]
    assert {c["allocation"]: c["feasible"] for c in answer["candidates"]}["6P2D"] is False
    for candidate in answer["candidates"]:
        assert set(candidate["terms"]) == {"prefill", "decode", "transfer", "overhead", "env"}
        assert all(math.isfinite(seconds) for seconds in candidate["terms"].values())
    chosen = next(c for c in answer["candidates"] if c["allocation"] == "3P5D")
    assert chosen["seconds"] == answer["seconds"]
    assert "3P5D" in answer["reason"]


def test_the_table_shows_feasible_allocations_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", "--profile", QWEN3_8B, "--workers", "5"]) == 0
    shown = capsys.readouterr().out
    assert "2P3D" in shown
    assert "4P1D" not in shown
    assert "2 of 5 cannot hold the batch's KV cache" in shown
    assert "5 workers: 2P3D" in shown


def test_a_narrow_window_cuts_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["decide", "--profile", QWEN3_8B, "--workers", "8"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert shown.count("allocation") == 2, "the table is in two parts, and each names its rows"
    assert all(f"{seconds} " in shown for seconds in (632.2, 323.4, 389.2))


def test_current_and_overrides_count(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["decide", "--profile", QWEN3_8B, "--workers", "13", "--current", "5P8D"]
    assert main(words) == 0
    assert "5P8D (591.3 s) stays" in capsys.readouterr().out
    assert main([*words, "platform.overhead_seconds=0"]) == 0
    assert "13 workers: 13C" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workload": {"batch_size": -3}}, "workload.batch_size: -3 must be greater than 0"),
        ({"workload": {"num_turns": "many"}}, 'workload.num_turns: "many" is not a number'),
        ({"workload": {"turns": 3}}, "workload.turns: unknown key; workload has batch_size"),
        ({"platform": {"kv_bandwidth_bytes_per_s": 0}}, "kv_bandwidth_bytes_per_s: 0 must be greater than 0"),
        ({"platform": {"overhead_seconds": -0.1}}, "platform.overhead_seconds: -0.1 must be 0 or more"),
        ({"platform": {"decode_fixed_seconds": 1e300}}, "at most 1e+18"),
        (
            {"platform": {"kv_bandwidth_bytes_per_s": 1e-300}},
            "too small to mean anything; use at least 1e-18",
        ),
        ({"platform": {"decode_fixed_seconds": True}}, "true is not a number"),
        ({"model": {}}, "model: unknown key; a profile has workload and platform"),
        ({"platform": None}, "platform: is missing"),
        ({"platform": 3}, "platform: is no object"),
    ],
)
def test_a_bad_profile_is_exit_2_with_file_key_value(
    change: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = json.loads(Path(QWEN3_8B).read_text())
    for section, content in change.items():
        if isinstance(content, dict) and section in table:
            table[section].update(content)
        else:
            table[section] = content
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(table))
    assert main(["decide", "--profile", str(path), "--workers", "8"]) == 2
    error = capsys.readouterr().err
    assert f"{path}: " in error
    assert said in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"workload": {"batch_size": NaN', "is not valid JSON"),
        ('{"workload": {"batch_size": 1e999}}', "is not valid JSON"),
        ("[]", "[] is no object"),
        ("{}", "workload: is missing"),
    ],
)
def test_what_is_no_profile_is_exit_2(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert main(["decide", "--profile", str(path), "--workers", "8"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "8"], "give both"),
        (["--profile", "absent.json", "--workers", "8"], "absent.json: cannot be read"),
        (["--profile", QWEN3_8B, "--workers", "0"], "--workers: 0: give a whole number from 1 to 100000"),
        (["--profile", QWEN3_8B, "--workers", "8", "--current", "8"], '--current: "8" is no allocation'),
        (
            ["--profile", QWEN3_8B, "--workers", "8", "--makespan", "x"],
            '--makespan "x": is not one of closed-form, fluid',
        ),
        (["--profile", QWEN3_8B, "--workers", "8", "workload.x=3"], "a profile has no workload.x"),
        (["--profile", QWEN3_8B, "--workers", "8", "batch"], "write section.key=number"),
    ],
)
def test_wrong_asking_is_exit_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", *words]) == 2
    assert said in capsys.readouterr().err


def test_another_model_of_the_makespan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["decide", "--profile", QWEN3_8B, "--workers", "13", "--makespan", "fluid", "--json"]
    assert main([*words, "workload.mean_turns=36.6"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["target"] == "5P8D"
