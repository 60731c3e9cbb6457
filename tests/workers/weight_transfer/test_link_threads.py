import threading as system
import time

from pearl.workers.weight_transfer import threads


def test_join_all_waits_for_a_thread_that_ends() -> None:
    done: list[int] = []
    threads.start("quick", done.append, 1)
    threads.join_all(5.0)
    assert done == [1]


def test_join_all_gives_up_on_a_stuck_thread_at_the_limit() -> None:
    go = system.Event()
    threads.start("stuck", wait_for, go)
    start = time.monotonic()
    threads.join_all(0.05)
    assert time.monotonic() - start < 2
    go.set()


def wait_for(event: system.Event) -> None:
    event.wait(5)
