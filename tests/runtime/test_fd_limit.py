"""File descriptors run out with a warning beforehand."""

import resource

import pytest

from pearl.runtime.fd_limit import check_fd_limit


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (soft, hard) limits set so far; the last is in force."""
    history = [(256, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: history[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: history.append(pair))
    return history


@pytest.mark.scenario("RX-01")
def test_enough_descriptors_change_nothing(limits: list[tuple[int, int]]) -> None:
    assert check_fd_limit(256) is None
    assert limits == [(256, 1024)]


@pytest.mark.scenario("RX-01")
def test_the_soft_limit_is_raised(limits: list[tuple[int, int]]) -> None:
    assert check_fd_limit(700) is None
    assert limits[-1] == (700, 1024)


@pytest.mark.scenario("RX-01")
def test_a_hard_limit_in_the_way_is_said_with_the_way_out(limits: list[tuple[int, int]]) -> None:
    warning = check_fd_limit(5000)
    assert warning is not None
    assert "about 5000" in warning
    assert "ulimit -Hn 5000" in warning
    assert limits[-1] == (1024, 1024)
