"""``pearl run``: which settings, which directory; the coordinator's service does the rest."""

import json
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from pearl import config as settings
from pearl.cli.model_check import check_model
from pearl.cli.output import drop_output
from pearl.cli.probes import probe
from pearl.config import ConfigError
from pearl.envs.loader import BUILT_IN, check_demonstrations, load_environment
from pearl.service import coordinator_process
from pearl.service.coordinator_process import check_address, load_trace
from pearl.service.own_router import load_router
from pearl.types.config import Config, RunConfig
from pearl.types.exit_codes import EXIT_USAGE

OF_NO_RUN = {
    "run_id",
    "coordinator.json",
    "identity.json",
    "logs",
    "coordinator.log",
    "metrics.jsonl",
    "trajectories.jsonl",
}
"""What a run leaves that never began."""


class Request(NamedTuple):
    """What the person typed."""

    config: Path | None
    overrides: Sequence[str]
    run_dir: Path | None
    dry_run: bool
    resume: bool
    if_there: bool = False  # resume when the directory holds a run, else begin it


def run(request: Request) -> int:
    """Run or resume; the exit code.

    Raises:
        ConfigError: for wrong settings or a directory that cannot be used.
    """
    if request.if_there:
        request = request._replace(resume=_is_there(request))
    config, run_dir = _resumed(request) if request.resume else _fresh(request)
    notes: list[str] = []
    _check_all(
        lambda: _check_environment(config),
        lambda: _check_router(config),
        lambda: check_address(config),
        lambda: check_model(config),
        lambda: load_trace(config, notes.append),
    )
    if request.dry_run:
        for note in notes:
            print(f"# {note}")
        print(settings.resolved_toml(config) + would_start(config, run_dir, request.resume))
        return 0
    run_dir = run_dir if request.resume else _claim(run_dir, by_name=request.run_dir is not None)
    code = coordinator_process.run(config, run_dir, resume=request.resume)
    if code != EXIT_USAGE:
        try:
            _close(run_dir)
        except BrokenPipeError:  # nobody reads on; the run is none the worse for it
            drop_output()
    return code


def _check_all(*checks: Callable[[], object]) -> None:
    """Raise one ConfigError with all that is found."""
    wrong = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))


def _check_environment(config: Config) -> None:
    """Load the environment before anything starts: a person's own in a process of its own, whatever it imports."""
    environment, warm_start = config.environment, config.warm_start
    if environment.name in BUILT_IN and not environment.reward:
        made = load_environment(environment.name, environment.options, config.model.path)
        if warm_start.num_steps:
            check_demonstrations(environment.name, made, warm_start.num_steps)
        return
    arguments = [environment.name, "--quiet", "--options-json", json.dumps(environment.options)]
    arguments += ["--model-path", config.model.path, "--warm-start", str(warm_start.num_steps)]
    arguments += ["--reward", environment.reward]
    limit_s = config.runtime.start_timeout_s
    try:
        checked = probe("pearl.envs.check", arguments, limit_s=limit_s)
    except subprocess.TimeoutExpired:
        with_reward = f' with environment.reward = "{environment.reward}"' if environment.reward else ""
        raise ConfigError(
            f'environment.name: "{environment.name}"{with_reward} is not loaded within '
            f"runtime.start_timeout_s = {limit_s:g}"
        ) from None
    if checked.returncode != 0:
        said = (checked.stdout.strip() or checked.stderr.strip()).decode(errors="replace")
        raise ConfigError(said or f"exit code {checked.returncode}")


def _check_router(config: Config) -> None:
    """A person's own is loaded before anything starts."""
    load_router(config)


def _close(run_dir: Path) -> None:
    """Say what happened and where the report is, however the run ended."""
    from pearl.report.report import build
    from pearl.report.terminal_summary import closing_lines

    for line in closing_lines(run_dir):
        print(line)
    path = run_dir / "report.html"
    try:
        print(f"report: {path if path.is_file() else build(run_dir)}")
    except OSError as error:
        print(f"no report: {error}; pearl report {run_dir} makes it later")


def would_start(config: Config, run_dir: Path, resume: bool) -> str:
    """Return what ``--dry-run`` prints after the settings: comments, so that the whole stays a TOML file."""
    rollout, training, environment = config.rollout, config.training, config.environment
    prompts = config.data.batch_size // config.data.group_size
    lines = [
        f"would {'resume' if resume else 'start'}, in {run_dir}:",
        "  1 coordinator and 1 node agent on this host",
        f"  training: {training.num_ranks} rank(s), model {config.model.path}, device {config.model.device}",
        f"  rollout: {rollout.num_workers} worker(s), engine {rollout.engine}, router {rollout.router}",
        *placement(config),
        f"  environment: {environment.num_workers} worker(s), {environment.name}",
        f"  {config.run.num_steps} steps of {prompts} prompts x {config.data.group_size} trajectories,"
        f" staleness at most {rollout.staleness_bound}",
    ]
    return "\n" + "\n".join(f"# {line}" for line in lines)


def placement(config: Config) -> list[str]:
    """Return a line for each pool of GPUs: which host gives how many, and what runs there."""
    rollout, elastic = config.rollout, config.elastic
    own_gpus = rollout.num_workers * rollout.gpus_per_worker - rollout.reserved_gpus
    own = f"    this host: {config.training.num_ranks} GPU(s) for training, {own_gpus} for rollout"
    lines = [
        "  placement:",
        own + (f", {elastic.preemptible_gpus} that come and go" if elastic.inter else ""),
    ]
    if rollout.reserved_gpus:
        lines.append(
            f"    reserved hosts (pearl agent --pool rollout): {rollout.reserved_gpus} GPU(s) for "
            f"{rollout.reserved_gpus // rollout.gpus_per_worker} worker(s), awaited for "
            f"{config.runtime.reserved_timeout_s:g} s"
        )
    spot = "as many as join" if elastic.inter else "none (elastic.inter = false)"
    return [*lines, f"    spot hosts (pearl agent --pool spot): {spot}"]


def _fresh(request: Request) -> tuple[Config, Path]:
    if request.config is None:
        raise ConfigError("give the job's CONFIG file, for example: pearl run launch/configs/quickstart.toml")
    config = settings.load(request.config, request.overrides)
    if request.run_dir is not None:
        _refuse_used(request.run_dir)
        return config, request.run_dir
    started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return config, Path(config.run.run_root) / f"{started}-{request.config.stem}"


def _refuse_used(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir {run_dir}: is a file")
    if run_dir.is_dir() and {path.name for path in run_dir.iterdir()} - OF_NO_RUN:
        raise ConfigError(
            f"--run-dir {run_dir}: is not empty; name a new directory, or add --resume to go on with the run in it"
        )


def _claim(run_dir: Path, *, by_name: bool) -> Path:
    """Make the directory. A name we chose is made unique; making it is what decides between two at once."""
    try:
        if by_name:
            run_dir.mkdir(parents=True, exist_ok=True)
            return run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        return _make_unique(run_dir)
    except OSError as error:
        raise ConfigError(f"{run_dir}: cannot be made: {error.strerror}; use --run-dir") from None


def _make_unique(run_dir: Path) -> Path:
    for number in range(1, 1000):
        candidate = run_dir if number == 1 else run_dir.with_name(f"{run_dir.name}-{number}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise ConfigError(f"{run_dir}: a thousand runs of that name; use --run-dir")


def _resumed(request: Request) -> tuple[Config, Path]:
    """The run's own settings; a CONFIG given beside --resume must say the same."""
    given = settings.load(request.config, request.overrides) if request.config is not None else None
    if given is None and request.overrides:
        raise ConfigError("--resume continues with the run's own settings: remove the overrides")
    run_dir = request.run_dir or _newest(Path((given.run if given else RunConfig()).run_root))
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(
            f"{run_dir}: has no config.toml, so there is no run to resume; start one without --resume"
        )
    try:
        config = settings.load(run_dir / "config.toml")
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nput {run_dir / 'config.toml'} back as it was when the run started ({run_dir / 'config.json'} "
            "has the same settings), or begin another run in a new directory"
        ) from None
    if given is not None and given != config:
        changed = ", ".join(_differences(given, config))
        raise ConfigError(
            f"{run_dir}: was started with other settings ({changed}); pearl run --resume --run-dir {run_dir} "
            "continues it with its own"
        )
    return config, run_dir


def _is_there(request: Request) -> bool:
    """Return whether --resume-if-there goes on with a run: the same line is for the first start and for all others."""
    if request.run_dir is None or request.config is None:
        raise ConfigError(
            "--resume-if-there needs CONFIG and --run-dir D: it begins the run, or continues it"
        )
    return (request.run_dir / "config.toml").is_file()


def _newest(run_root: Path) -> Path:
    configs = list(run_root.glob("*/config.toml"))
    if not configs:
        raise ConfigError(f"{run_root}: holds no run to resume; name one with --run-dir")
    return max(configs, key=lambda path: path.stat().st_mtime_ns).parent


def _differences(one: Config, other: Config) -> list[str]:
    left, right = msgspec.to_builtins(one), msgspec.to_builtins(other)
    return [f"{name}.{key}" for name in left for key in left[name] if left[name][key] != right[name][key]]
