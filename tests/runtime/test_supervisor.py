import asyncio
import logging

import pytest

from pearl.runtime.rate_limited_log import RateLimitedLogger
from pearl.runtime.supervisor import RestartLimit, TaskFailedError, supervise

LIMIT_S = 10.0


async def forever() -> None:
    await asyncio.Event().wait()


async def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("broken", ["heartbeat", "drain", "collector"])
@pytest.mark.scenario("PL-06")
async def test_an_error_in_any_task_comes_out_at_once_with_its_name(broken: str) -> None:
    tasks = {name: forever() for name in ("heartbeat", "drain", "collector") if name != broken}
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TaskFailedError, match=f"task '{broken}' failed: KeyError: 'x'") as raised:
            await supervise({**tasks, broken: fails(KeyError("x"))})
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.name == broken


@pytest.mark.scenario("PL-06")
async def test_a_task_whose_own_wait_was_cancelled_is_not_just_missing() -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TaskFailedError, match="task 'syncer' failed: CancelledError"):
            await supervise({"syncer": fails(asyncio.CancelledError()), "other": forever()})


async def test_the_first_to_return_ends_the_others() -> None:
    cleaned = []

    async def cleans_up() -> None:
        try:
            await forever()
        finally:
            cleaned.append(True)

    async def returns() -> None:
        await asyncio.sleep(0)

    assert await supervise({"a": cleans_up(), "b": returns()}) == "b"
    assert cleaned == [True]


async def test_a_cancelled_supervisor_is_cancelled_even_when_a_task_fails_over_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails_when_cancelled() -> None:
        try:
            await forever()
        finally:
            raise KeyError("late")

    async with asyncio.TaskGroup() as group:
        running = group.create_task(supervise({"a": fails_when_cancelled(), "b": forever()}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
    assert running.cancelled()
    assert "task 'a' failed: KeyError: 'late'" in caplog.text


def test_restarts_are_limited_within_the_window_and_forgotten_after_it() -> None:
    limit = RestartLimit(max_restarts=2, window_s=10.0)
    assert [limit.allows(now) for now in (0.0, 1.0)] == [True, True]
    assert not limit.allows(9.0)
    limit = RestartLimit(max_restarts=2, window_s=10.0)
    assert all(limit.allows(now) for now in (0.0, 6.0, 12.0, 18.0, 24.0))


@pytest.mark.scenario("ME-03")
def test_a_line_that_comes_all_the_time_is_said_once_in_a_while_with_its_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limited = RateLimitedLogger(logging.getLogger("test"), period_s=60.0)
    for tick in range(121_000):
        limited.warning(tick / 1000, "peer %d is down", 7)
    assert [record.getMessage() for record in caplog.records] == [
        "peer 7 is down",
        "peer 7 is down (and 59999 more like it before)",
        "peer 7 is down (and 59999 more like it before)",
    ]
