"""``pearl run`` with a model that cannot be run: exit code 2 and the reason, and nothing is left behind."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pearl.cli import main, model_check
from pearl.cli.model_check import check_model
from pearl.config import ConfigError
from pearl.types.config import Config, ModelConfig, TrainingConfig

MIXED = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 32,
    "n_layer": 1,
    "n_head": 2,
}
"""A model whose attention cannot be replaced."""


def job(tmp_path: Path) -> list[str]:
    (tmp_path / "job.toml").write_text("[run]\nnum_steps = 1\n")
    return ["run", str(tmp_path / "job.toml"), f"run.run_root={tmp_path / 'runs'}"]


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "nowhere"])
def test_a_wrong_path_says_that_nothing_is_downloaded(
    path: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*job(tmp_path), f"model.path={path}", *more]) == 2
    told = capsys.readouterr().err
    assert f'model.path: "{path}" is not a model directory' in told
    assert "nothing is ever downloaded" in told
    assert not (tmp_path / "runs").exists()


def test_a_model_that_cannot_be_run_is_refused_within_seconds(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MIXED))
    command = [
        sys.executable,
        "-m",
        "pearl.cli",
        *job(tmp_path),
        f"model.path={tmp_path / 'model'}",
        "--dry-run",
    ]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    seconds = time.monotonic() - began
    assert done.returncode == 2, done.stderr
    assert "(BloomForCausalLM) cannot be run by engine torch" in done.stderr
    assert "its attention cannot be replaced" in done.stderr
    assert "no other engine helps" in done.stderr
    assert "no weight file" in done.stderr
    assert not (tmp_path / "runs").exists()
    assert seconds < 60.0, "a few seconds on a free host"


def test_a_probe_that_fails_is_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(model_check, "PROBE", "pearl.nowhere")
    with pytest.raises(ConfigError, match=r"could not be examined: .*No module named"):
        check_model(Config(model=ModelConfig(path=str(tmp_path))))


def test_an_emulated_training_world_needs_no_model() -> None:
    check_model(Config(model=ModelConfig(path="nowhere"), training=TrainingConfig(engine="emulated")))
