"""What a run left, from Python; and that ``import pearl`` costs nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pearl
from pearl.api import RunError
from pearl.cli import run as command
from pearl.config import load
from pearl.runtime.token_store import TokenStore
from pearl.types.trajectory import VersionRun
from pearl.types.weights import Version

VERSION = Version(0, 0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    lines = [{"kind": "step", "step": k, "time_s": float(k), "reward_mean": k / 4} for k in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "trajectories.jsonl").write_text('{"trajectory": 7, "reward": 1.0}\n')
    store = TokenStore(tmp_path / "tokens")
    store.append(7, "prompt", 0, np.array([3, 4], "<i4").tobytes())
    store.append(
        7,
        "generated",
        0,
        np.array([5], "<i4").tobytes(),
        np.array([-0.5], "<f4").tobytes(),
        (VersionRun(VERSION, 1, VERSION),),
    )
    store.forget(7)
    store.close()
    return tmp_path


def test_steps_trajectories_and_tokens_of_a_run(run_dir: Path) -> None:
    run = pearl.runs.open(run_dir)
    assert [step["reward_mean"] for step in run.steps] == [0.0, 0.25, 0.5]
    tokens = run.tokens(run.trajectories[0]["trajectory"])
    assert tokens.ids.tolist() == [3, 4, 5]
    assert tokens.generated.tolist() == [False, False, True]
    assert tokens.logprobs.tolist() == [0.0, 0.0, -0.5]
    assert run.token_trajectories() == [7]
    with pytest.raises(KeyError, match="no tokens of trajectory 8"):
        run.tokens(8)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a run directory"):
        pearl.runs.open(tmp_path)


def test_a_job_given_as_a_mapping_is_run_as_from_a_file(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run_job(request: command.Request) -> int:
        assert request.config is not None
        seen.append(load(request.config, request.overrides))
        return 0

    monkeypatch.setattr(command, "run", run_job)
    run = pearl.run({"run": {"num_steps": 3}}, run_dir, ["run.seed=5"])
    assert len(run.steps) == 3
    assert (seen[0].run.num_steps, seen[0].run.seed) == (3, 5)


def test_a_run_that_failed_raises_with_its_exit_code(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", lambda request: 143)
    with pytest.raises(RunError, match="exit code 143") as failed:
        pearl.run("job.toml", run_dir)
    assert failed.value.exit_code == 143


def test_importing_pearl_imports_nothing_else() -> None:
    code = "import pearl, sys; print(sorted(m for m in sys.modules if m in ('numpy', 'zmq', 'torch', 'msgspec')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_stub_names_what_the_package_offers() -> None:
    stub = ast.parse(Path(pearl.__file__).with_name("__init__.pyi").read_text())
    imported = [
        alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert sorted(filter(None, imported)) == pearl.__all__
    for name in pearl.__all__:
        assert getattr(pearl, name)
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        getattr(pearl, "walk")  # noqa: B009 - mypy knows that there is none
