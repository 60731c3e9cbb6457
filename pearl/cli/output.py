"""Standard output: as wide as it is, and one whose reader has left."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 130
"""Of a file or a pipe, which have no width of their own: cut cells would be lost figures."""


def wide_console() -> "Console":
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_COLUMNS
    return console


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError when a file cannot be written there: before the work, not after it."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a directory; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written")


def drop_output() -> None:
    """Write it to nowhere from now on. Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, code: int) -> int:
    """Print an error to stderr, each line marked, and return ``code``."""
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code
