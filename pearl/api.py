"""Runs a job from Python, as ``pearl run`` does from the terminal."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from pearl import config as settings
from pearl import runs
from pearl.config import ConfigError
from pearl.types.config import Config

__all__ = ["ConfigError", "RunError", "run"]


class RunError(RuntimeError):
    """The run failed or was stopped; ``exit_code`` is that of ``pearl run``, ``run_dir`` what it left."""

    def __init__(self, exit_code: int, run_dir: Path) -> None:
        super().__init__(f"the run in {run_dir} ended with exit code {exit_code}")
        self.exit_code = exit_code
        self.run_dir = run_dir


def run(
    job: str | Path | Mapping[str, Any] | Config,
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
) -> runs.Run:
    """Run ``job`` to its end and open what it left in ``run_dir``.

    ``job`` is a TOML file, a mapping of sections as in one, or the settings themselves; ``overrides`` are
    "section.key=value". Call it from the main thread: it handles SIGINT and SIGTERM while it runs, and its lines go
    to standard output.

    Raises:
        ConfigError: settings or the directory cannot be used; nothing was started.
        RunError: the run failed or was stopped.
    """
    from pearl.cli.run import Request
    from pearl.cli.run import run as run_job

    directory = Path(run_dir)
    with tempfile.TemporaryDirectory(prefix="pearl-job-") as folder:
        path = _as_file(job, Path(folder))
        code = run_job(Request(path, overrides, directory, dry_run=False, resume=resume))
    if code != 0:
        raise RunError(code, directory)
    return runs.open(directory)


def _as_file(job: str | Path | Mapping[str, Any] | Config, folder: Path) -> Path:
    if isinstance(job, str | Path):
        return Path(job)
    path = folder / "job.toml"
    path.write_text(settings.resolved_toml(job) if isinstance(job, Config) else tomli_w.dumps(job))
    return path
