"""Append-only histories."""

import pytest

from pearl.envs.history import added
from pearl.envs.protocol import InfrastructureError


def test_what_a_rendering_adds() -> None:
    assert added([1, 2], [1, 2, 3, 4]) == [3, 4]
    assert added([], [1]) == [1]
    assert added([1], [1]) == []


def test_tk_02_a_rewritten_or_shortened_history_is_refused() -> None:
    with pytest.raises(InfrastructureError, match="position 1 was id 2 and is now 3"):
        added([1, 2, 3], [1, 3, 3, 4])
    with pytest.raises(InfrastructureError, match="of 3 ids it keeps 2"):
        added([1, 2, 3], [1, 2])
