"""The run's status however often it is asked for: asking costs a small part of the coordinator's time."""

from pearl.service.status_json import COST_FACTOR, StatusJson
from pearl.testing.manual_clock import ManualClock


def test_what_was_costly_to_make_is_used_again_for_a_while() -> None:
    clock, made = ManualClock(), 0

    def make() -> bytes:
        nonlocal made
        made += 1
        clock.advance(0.5)
        return b"%d" % made

    status = StatusJson(make, clock)
    assert [status.json() for _ in range(1000)] == [b"1"] * 1000
    clock.advance(0.5 * COST_FACTOR - 0.1)
    assert status.json() == b"1"
    clock.advance(0.2)
    assert status.json() == b"2"


def test_what_costs_nothing_is_made_each_time() -> None:
    made = iter(range(10))
    status = StatusJson(lambda: b"%d" % next(made), ManualClock())
    assert [status.json() for _ in range(3)] == [b"0", b"1", b"2"]
