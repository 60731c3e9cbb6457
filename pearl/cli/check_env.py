"""``pearl check-env``: which settings; a process of its own loads the environment, plays it and says what it found."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import tomli_w

from pearl import config as settings
from pearl.cli.probes import run_attached
from pearl.types.config import Config
from pearl.types.exit_codes import EXIT_FAILURE

CHECKER = "pearl.envs.check_env"
WIDE: dict[str, dict[str, int]] = {
    "rollout": {"max_context_tokens": 8192, "max_new_tokens_per_turn": 1024},
    "training": {"tokens_per_micro_batch": 8192},
}
"""For an environment without a job's settings, whose defaults fit symbols and no text."""


class Request(NamedTuple):
    name: str  # an environment's, or a job's file
    overrides: Sequence[str]
    num_tasks: int
    pass_mark: float
    limit_s: float
    as_json: bool


def check_env(request: Request) -> int:
    """Check it; the exit code is the checker's."""
    config = _config(request)
    arguments = ["--tasks", str(request.num_tasks), "--pass-mark", str(request.pass_mark)]
    arguments += ["--json"] if request.as_json else []
    question = msgspec.json.encode(config)
    try:
        return run_attached(CHECKER, arguments, limit_s=request.limit_s, question=question)
    except subprocess.TimeoutExpired:
        print(f"error: {request.name}: not done within --limit {request.limit_s:g} s", file=sys.stderr)
        return EXIT_FAILURE


def _config(request: Request) -> Config:
    overrides = [
        word if "." in word.partition("=")[0] else f"environment.options.{word}" for word in request.overrides
    ]
    if request.name.endswith(".toml"):
        return settings.load(request.name, overrides)
    with tempfile.TemporaryDirectory(prefix="pearl-check-") as directory:
        path = Path(directory) / "environment.toml"
        path.write_text(tomli_w.dumps({"environment": {"name": request.name}, **WIDE}))
        return settings.load(path, overrides)
