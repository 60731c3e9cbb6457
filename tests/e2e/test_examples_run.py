"""The pages' promise: the example environment trains as its page says, with the examples' own parts in their places."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.testing.live_run import ROOT, read_lines

EXAMPLES = ROOT / "examples"
OWN_PARTS = (
    "environment.reward=own_reward:first_answers",
    "rollout.router=own_router:long_stays",
    "training.advantage=own_objective:against_the_best",
    "training.loss=own_objective:reinforce",
)
SMALL = (
    "run.num_steps=2",
    "data.batch_size=16",
    "data.group_size=4",
    "environment.num_evaluation_tasks=0",
    "rollout.num_workers=1",
    "agreement.at_start=false",
    "model.device=cpu",
)


def pearl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pearl.cli", *words],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.timeout(150)
def test_the_example_environment_trains_with_the_examples_own_parts(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = pearl("run", "own_environment.toml", *OWN_PARTS, *SMALL, "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories_trained"], summary["trajectories_masked"]) == (2, 32, 0)
    trained = [
        line for line in read_lines(run_dir / "trajectories.jsonl") if line["trained_step"] is not None
    ]
    right = [line for line in trained if line["outcome"] == "done"]
    assert right, "a random answer is right now and then"
    for line in trained:
        assert line["reward"] == (1 / len(line["turns"]) if line["outcome"] == "done" else 0), line
    assert {1.0, 0.5} & {line["reward"] for line in right}
    assert pearl("replay", str(run_dir)).returncode == 0, "the router chooses the same again"
