"""Which versions are alive after restores: hand cases."""

import pytest

from pearl.types.lineage import Lineages
from pearl.types.weights import Version


def lineages(*opened: tuple[int, int]) -> Lineages:
    found = Lineages()
    for lineage, step in opened:
        found.open(Version(lineage, step))
    return found


@pytest.mark.parametrize(
    ("version", "alive"),
    [
        (Version(0, 3), True),
        (Version(0, 4), False),  # its update was discarded by the restore to step 3
        (Version(1, 3), True),
        (Version(1, 9), True),
    ],
)
def test_a_restore_kills_later_steps_of_its_predecessors(version: Version, alive: bool) -> None:
    assert lineages((0, 0), (1, 3)).holds(version) is alive


def test_a_second_restore_kills_what_the_first_let_live() -> None:
    found = lineages((0, 0), (1, 5), (2, 2))
    assert found.holds(Version(0, 2))
    assert not found.holds(Version(0, 4))
    assert not found.holds(Version(1, 3))
    assert found.newest == 2


def test_lineages_only_grow() -> None:
    with pytest.raises(AssertionError):
        lineages((1, 0), (0, 5))


def test_no_lineage_yet() -> None:
    assert Lineages().newest == -1
    assert Lineages().holds(Version(0, 0))
