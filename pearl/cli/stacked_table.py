"""A table that loses no cell in a narrow window: the columns that do not fit go into tables below it.

Each of them begins with the first column again, so that every row keeps its name.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

GAP = 3
"""Columns of the window between two columns of a table, whatever its box."""
FOLDED = 16
"""Width of a folding column when room is short."""


class Column(NamedTuple):
    name: str
    is_number: bool = False  # right-aligned
    folds: bool = (
        False  # its cells may be broken over lines; others are never cut while the window holds them
    )


class Row(NamedTuple):
    cells: Sequence[str]
    style: str = ""


def stacked_table(columns: Sequence[Column], rows: Sequence[Row], width: int, **options: Any) -> Group:
    """Give the rows as one table, or as several of at most ``width``; ``options`` are those of ``rich``'s table."""
    options = {"box": SIMPLE_HEAD, "pad_edge": False, "show_edge": False, **options}
    return Group(*(_table(columns, rows, chunk, options) for chunk in _chunks(columns, rows, width)))


def _chunks(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Iterator[list[int]]:
    """Yield indices of columns, the first one in each; at least one other, however narrow the window is."""
    widths = [_width(column, [row.cells[index] for row in rows]) for index, column in enumerate(columns)]
    chunk, used = [0], 1 + widths[0] + GAP
    for index in range(1, len(columns)):
        needed = widths[index] + GAP
        if len(chunk) > 1 and used + needed > width:
            yield chunk
            chunk, used = [0], 1 + widths[0] + GAP
        chunk.append(index)
        used += needed
    yield chunk


def _width(column: Column, cells: Sequence[str]) -> int:
    natural = max(map(cell_len, (column.name, *cells)))
    return max(cell_len(column.name), min(natural, FOLDED)) if column.folds else natural


def _table(
    columns: Sequence[Column], rows: Sequence[Row], chunk: Sequence[int], options: dict[str, Any]
) -> Table:
    table = Table(**options)
    for column in (columns[index] for index in chunk):
        overflow: Literal["fold", "ellipsis"] = "fold" if column.folds else "ellipsis"
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(column.name, no_wrap=not column.folds, overflow=overflow, justify=justify)
    for row in rows:
        table.add_row(*(Text(row.cells[index]) for index in chunk), style=row.style)
    return table
