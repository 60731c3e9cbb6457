"""``pearl simulate`` from the command line: its table, its JSON, and its usage errors."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pearl.cli import main

CONFIG = str(Path(__file__).parents[2] / "launch" / "configs" / "simulate-8b.toml")
QUICK = ("data.batch_size=8", "data.group_size=4", "rollout.max_context_tokens=8192", "training.num_ranks=4")
SHORT = (*QUICK, "rollout.max_new_tokens_per_turn=4096")


def simulate(*words: str) -> int:
    return main(["simulate", CONFIG, *SHORT, *words])


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def test_a_table_and_the_same_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,gpus\n0,4\n300,2\n")
    target = tmp_path / "out.json"
    words = ("--policy", "roll,rlboost+,areal", "--trace", str(trace), "--seconds", "600")
    assert simulate(*words, "--json", str(target)) == 0
    table = capsys.readouterr().out
    answer = json.loads(target.read_text())
    assert list(answer["policies"]) == ["roll", "rlboost+", "areal"]
    assert answer["seed"] == 0
    assert finite(answer)
    roll, elastic = answer["policies"]["roll"], answer["policies"]["rlboost+"]
    assert roll["ratio"] == answer["policies"]["areal"]["ratio"] == 1.0
    assert (elastic["arrivals"], elastic["reclaims"]) == (4, 2)
    assert roll["prompts_trained_twice"] == 0
    assert {"mode_switches", "ratio_switches", "borrows", "tokens_lost", "steps"} <= roll.keys()
    assert "h800-qwen3-8b (data sheet)" in table
    assert f"{roll['throughput_tokens_per_s']:.0f}" in table
    assert "areal: its staleness" in table


def test_a_narrow_window_cuts_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert simulate("--policy", "roll", "--seconds", "100") == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert shown.count("policy") == shown.count("  roll ") > 1
    assert "tokens lost" in shown


def test_several_seeds_run_in_processes_and_give_an_interval(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    words = ("--policy", "roll,roll-large", "--seeds", "3-4", "--seconds", "700", "--json", str(target))
    assert simulate(*words) == 0
    answer = json.loads(target.read_text())
    assert (answer["seed"], answer["seeds"]) == (3, [3, 4])
    roll = answer["policies"]["roll"]
    assert [one["seed"] for one in roll["per_seed"]] == [3, 4]
    assert roll["ratio_ci95"] == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "rol"), "did you mean roll?"),
        (("--policy", ","), "name at least one"),
        (("--policy", "roll,roll"), "named twice"),
        (("--policy", "roll", "--seeds", "9-0"), "runs backwards"),
        (("--policy", "roll", "--seeds", "a-b"), "write 3, or 0-9"),
        (("--policy", "roll", "--seconds", "0"), "--seconds: 0: give seconds"),
        (("--policy", "roll", "--seconds", "nan"), "--seconds: nan: give seconds"),
        (("--policy", "roll", "--hardware", "h100"), "no profile"),
        (("--policy", "roll", "--workload", "swe"), "--workload"),
        (("--policy", "roll", "--trace", "/nowhere.csv"), "/nowhere.csv"),
        (("--policy", "roll", "--json", "/nowhere/out.json"), "no directory /nowhere"),
        (("--policy", "roll", "--json", "/tmp"), "is a directory"),
        (("--policy", "roll", "rollout.gpus_per_worker=1"), "a worker of h800-qwen3-8b has 2 GPUs"),
        (("--policy", "roll", "model.path=tiny-qwen3"), "no shipped hardware profile"),
        (("--policy", "roll", "rollout.rooter=sticky"), "rollout.router"),
        (("--policy", "roll", "another.toml"), "one CONFIG"),
    ],
)
def test_what_was_asked_wrongly_is_said_with_the_way_out(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*words) == 2
    assert said in capsys.readouterr().err


def test_a_policy_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate() == 2
    assert "--policy" in capsys.readouterr().err
