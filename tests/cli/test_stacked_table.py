"""A table in a narrow window: every cell is shown whole, and every part of it names its rows."""

import io

import pytest
from rich.console import Console

from pearl.cli.stacked_table import Column, Row, stacked_table

COLUMNS = [
    Column("name"),
    Column("host", folds=True),
    *(Column(f"figure {n}", is_number=True) for n in range(5)),
]
ROWS = [Row((name, f"{name}-host", *(f"{name}{n}" for n in range(5)))) for name in ("first", "second")]


def printed(width: int, rows: list[Row] = ROWS) -> list[str]:
    stream = io.StringIO()
    Console(width=width, file=stream).print(stacked_table(COLUMNS, rows, width))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 30, 50, 70])
def test_nothing_is_cut_and_every_part_begins_with_the_first_column(width: int) -> None:
    lines = printed(width)
    words = " ".join(lines).split()
    for row in ROWS:
        assert set(row.cells) <= set(words)
    assert max(map(len, lines)) <= width
    heads = [line for line in lines if "figure" in line or "host " in line]
    assert len(heads) > 1
    assert {line.split()[0] for line in lines if line.strip("─ ")} == {"name", "first", "second"}


def test_a_window_with_room_shows_one_table() -> None:
    assert [line.split()[0] for line in printed(100)] == [
        "name",
        "─" * len(printed(100)[1]),
        "first",
        "second",
    ]


def test_a_long_host_is_broken_over_lines() -> None:
    lines = printed(40, [Row(("a", "h" * 60, *"01234"))])
    assert "".join(lines).count("h") == 60 + 1  # the other is that of "host"
    assert "…" not in "".join(lines)
