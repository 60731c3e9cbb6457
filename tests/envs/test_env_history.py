"""Append-only histories."""

import pytest

from pearl.envs.history import appended_ids
from pearl.envs.protocol import InfrastructureError


def test_what_a_rendering_adds() -> None:
    assert appended_ids([1, 2], [1, 2, 3, 4]) == [3, 4]
    assert appended_ids([], [1]) == [1]
    assert appended_ids([1], [1]) == []


@pytest.mark.scenario("TK-02")
def test_a_rewritten_or_shortened_history_is_refused() -> None:
    with pytest.raises(InfrastructureError, match="position 1 was id 2 and is now 3"):
        appended_ids([1, 2, 3], [1, 3, 3, 4])
    with pytest.raises(InfrastructureError, match="of 3 ids it keeps 2"):
        appended_ids([1, 2, 3], [1, 2])
