"""Whether the job's model can be run at all, before anything starts.

A process of its own is asked: only that one imports torch and transformers.
"""

import subprocess
from pathlib import Path

import msgspec

from pearl.cli.probes import probe
from pearl.config import ConfigError
from pearl.types.config import Config
from pearl.types.model_report import ModelReport

PROBE = "pearl.workers.architecture.probe"
LIMIT_S = 120.0
"""Mostly for importing torch on a busy or cold host; a probe takes a few seconds."""
BUILT_IN = "tiny-qwen3"


def check_model(config: Config) -> None:
    """Raises ConfigError with the model, the reasons, and what else could run it; or when it cannot be examined."""
    path = config.model.path
    if path == BUILT_IN or config.training.engine == "emulated":
        return
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f'model.path: "{path}" is not a model directory (no config.json there), and nothing is ever downloaded; '
            f'give the path of a transformers model on this host, or "{BUILT_IN}"'
        )
    report = _probe(config)
    if report.problems:
        raise ConfigError(_refusal(config, report))


def _refusal(config: Config, report: ModelReport) -> str:
    engine = config.rollout.engine
    lines = [f'model.path: "{config.model.path}" ({report.architecture}) cannot be run by engine {engine}:']
    lines += [f"  {problem}" for problem in report.problems]
    if report.remedy:
        lines.append(f"  {report.remedy}")
    return "\n".join(lines)


def _probe(config: Config) -> ModelReport:
    try:
        done = probe(PROBE, limit_s=LIMIT_S, question=msgspec.json.encode(config))
    except subprocess.TimeoutExpired:
        raise ConfigError(f"model.path: could not be examined within {LIMIT_S:g} s; try again") from None
    try:
        return msgspec.json.decode(done.stdout, type=ModelReport)
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ConfigError(f'model.path: "{config.model.path}" could not be examined: {reason}') from None
