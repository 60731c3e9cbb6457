"""Short runs under fire, as ``benchmarks/chaos.py`` does them: every promise holds, whatever was hurt."""

import subprocess
import sys
from pathlib import Path

import pytest

from pearl.testing.live_run import ROOT

START_LIMIT_S = 400.0  # besides the actions, on a busy machine


def torment(run_dir: Path, seed: int, minutes: float, *words: str) -> None:
    script = str(ROOT / "benchmarks" / "chaos.py")
    command = [
        sys.executable,
        script,
        f"--seed={seed}",
        f"--minutes={minutes}",
        f"--run-dir={run_dir}",
        *words,
    ]
    result = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 * minutes + START_LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "PASS" in result.stdout.splitlines()[-1]


@pytest.mark.timeout(500)
def test_everything_is_hurt_and_nothing_is_lost(tmp_path: Path) -> None:
    """A dozen actions and the death of the coordinator, with the emulated engines, which start in no time."""
    torment(tmp_path / "run", 1, 1.0, "--engine=emulated", "--actions=12")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("engine", ["torch", "emulated"])
def test_everything_is_hurt_for_longer(tmp_path: Path, seed: int, engine: str) -> None:
    torment(tmp_path / "run", seed, 3.0, f"--engine={engine}")
