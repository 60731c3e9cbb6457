"""Standard output: as wide as it is, and one whose reader has left."""

import os
import sys
from typing import TYPE_CHECKING

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


def drop_output() -> None:
    """Write it to nowhere from now on. Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
