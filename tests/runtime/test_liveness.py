import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.runtime.liveness import IdleTimer, Limits, Liveness, LoopLag
from pearl.types.messages.control import Heartbeat

LIMITS = Limits(
    heartbeat_period_s=0.5, heartbeat_timeout_s=10.0, progress_timeout_s=60.0, start_timeout_s=120.0
)
WORKING = Heartbeat(progress=1, pending=3)


class Judge:
    """Looks every period; the peer beats at each look unless told otherwise."""

    def __init__(self, *, ready: bool = True) -> None:
        self.now = 0.0
        self.liveness = Liveness(LIMITS, self.now)
        self.liveness.add("w", self.now, ready=ready)

    def watch(self, seconds: float, beat: Heartbeat | None) -> tuple[str, str]:
        """The health after that time."""
        state, reason = "alive", ""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            if beat is not None:
                self.liveness.beat("w", beat, self.now)
            health = self.liveness.check(self.now)
            state, reason = (health[0].state, health[0].reason) if health else ("alive", "")
        return state, reason


def test_silence_is_death_after_its_limit_and_not_before() -> None:
    judge = Judge()
    assert judge.watch(10.0, None)[0] == "alive"
    state, reason = judge.watch(0.5, None)
    assert state == "dead"
    assert reason == "silent for 10.5 s, runtime.heartbeat_timeout_s = 10"


def test_work_without_progress_is_stuck_but_idleness_is_not() -> None:
    judge = Judge()
    assert judge.watch(300.0, Heartbeat(progress=1))[0] == "alive"
    assert judge.watch(60.0, WORKING)[0] == "alive"
    state, reason = judge.watch(0.5, WORKING)
    assert state == "stuck"
    assert reason == "3 pending, no progress for 60.5 s, runtime.progress_timeout_s = 60"


def test_progress_starts_the_limit_anew() -> None:
    judge = Judge()
    for progress in range(10):
        assert judge.watch(59.0, Heartbeat(progress=progress, pending=3))[0] == "alive"


@pytest.mark.scenario("MB-04")
def test_busy_is_never_stuck_once_started() -> None:
    judge = Judge()
    assert judge.watch(1000.0, Heartbeat(progress=1, busy="compiling", pending=3))[0] == "alive"
    assert judge.watch(60.0, WORKING)[0] == "alive"  # the limit counts from the end of being busy


@pytest.mark.scenario("MB-04")
def test_a_start_has_its_own_limit_busy_or_not() -> None:
    judge = Judge(ready=False)
    busy = Heartbeat(progress=0, busy="warming up")
    assert judge.watch(120.0, busy)[0] == "alive"
    assert judge.watch(0.5, busy) == (
        "stuck",
        "not ready after 120.5 s (warming up), runtime.start_timeout_s = 120",
    )
    judge.liveness.ready("w")
    assert judge.watch(0.5, busy)[0] == "alive"


@pytest.mark.parametrize("slept_s", [8.0, 11.0, 3600.0])
@pytest.mark.scenario("MB-04")
def test_what_the_judge_slept_is_held_against_nobody(slept_s: float) -> None:
    judge = Judge()
    judge.watch(9.0, None)  # nearly dead
    judge.now += slept_s
    assert judge.liveness.check(judge.now + 0.5) == []
    judge.now += 0.5
    assert judge.liveness.asleep_s == pytest.approx(slept_s)
    assert judge.watch(0.5, None)[0] == "alive"
    assert judge.watch(0.5, None)[0] == "dead"  # its own silence still counts


@pytest.mark.scenario("MB-04")
def test_time_with_a_full_queue_is_held_against_nobody() -> None:
    liveness = Liveness(LIMITS, 0.0)
    liveness.add("w", 0.0, ready=True)
    paused_s = 0.0
    for tick in range(1, 100):
        paused_s += 0.5
        assert liveness.check(tick * 0.5, paused_s) == []


def test_a_word_after_the_sleep_leaves_no_credit() -> None:
    liveness = Liveness(LIMITS, 0.0)
    liveness.add("w", 0.0, ready=True)
    liveness.heard("w", 100.0)
    assert liveness.check(100.0) == []
    health = [liveness.check(100.0 + tick * 0.5) for tick in range(1, 22)]
    assert health[:-1] == [[]] * 20
    assert health[-1][0].state == "dead"


@pytest.mark.scenario("MB-05")
def test_a_new_incarnation_starts_with_a_clean_sheet() -> None:
    judge = Judge()
    assert judge.watch(11.0, None)[0] == "dead"
    judge.liveness.remove("w")
    judge.liveness.beat("w", WORKING, judge.now)  # of the old one, late: ignored
    judge.liveness.add("w", judge.now, ready=True)
    assert judge.watch(10.0, None)[0] == "alive"


@pytest.mark.scenario("ME-01")
def test_time_that_goes_back_makes_no_negative_span() -> None:
    silence = IdleTimer(10.0)
    silence.heard(5.0)
    assert silence.seconds(11.0) == 1.0
    assert silence.seconds(3.0) == 0.0
    assert LoopLag(0.5, 10.0).measure(3.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.booleans()), max_size=60))
def test_silence_never_exceeds_the_time_since_the_last_word(steps: list[tuple[float, bool]]) -> None:
    now, last, silence, loop_lag = 0.0, 0.0, IdleTimer(0.0), LoopLag(0.5, 0.0)
    for gap, word in steps:
        now += gap
        if word:
            silence.heard(now)
            last = now
        silence.excuse(now, loop_lag.measure(now))
        assert 0.0 <= silence.seconds(now) <= now - last + 1e-9
