"""``pearl status``: asks a live run's coordinator for its worker table and prints it."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from pearl.config import ConfigError
from pearl.runtime import registry
from pearl.runtime.registry import LiveRun

FAILED = 1
COLUMNS = ("slot", "incarnation", "role", "zone", "activity", "gpus", "weight_version", "host", "pid")
STYLES = {"active": "green", "transitioning": "yellow", "inactive": "red"}


def status(run_dir: Path | None, *, as_json: bool) -> int:
    """Print the status of ``run_dir``'s run, or of the newest live one; 1 when there is none or it is silent."""
    if run_dir is not None and not run_dir.is_dir():
        raise ConfigError(f"--run-dir {run_dir}: is no directory")
    run = registry.find(run_dir) if run_dir is not None else registry.newest_live()
    if run is None:
        where = f"in {run_dir}" if run_dir is not None else "on this host (of this user)"
        print(f"error: no live run {where}", file=sys.stderr)
        return FAILED
    from pearl.cli.asking import SilentError, ask_status

    try:
        answer = ask_status(run)
    except SilentError as error:
        print(f"error: {run.run_dir}: {error}", file=sys.stderr)
        return FAILED
    if as_json:
        print(answer.decode())
    else:
        show(run, msgspec.json.decode(answer))
    return 0


def show(run: LiveRun, answer: dict[str, Any]) -> None:
    """The table for a person; keys that a newer coordinator adds are left to ``--json``."""
    from rich.console import Console
    from rich.table import Table

    version = answer.get("weight_version")
    console = Console()
    console.print(f"{run.run_dir}  pid {run.pid}  {run.address}", soft_wrap=True, highlight=False)
    console.print(f"step {answer.get('step')}, weight version {'-' if version is None else version}")
    table = Table(*(name.replace("_", " ") for name in COLUMNS))
    for worker in answer.get("workers", ()):
        style = STYLES.get(str(worker.get("activity")), "")
        table.add_row(*(_cell(worker.get(name)) for name in COLUMNS), style=style)
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value in (None, "") else str(value)
