"""Threads of the links: daemons, since a stuck backend must never keep a process alive, yet given the time to end.

A thread that leaves the backend's C++ code while the interpreter is being torn down aborts the process, which
would look like a crash. So at exit those still running are joined, for a bounded time.
"""

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

EXIT_WAIT_S = 10.0
"""The default limit of one bucket, after which a stuck operation ends by itself."""

_lock = threading.Lock()
_running: set[threading.Thread] = set()


def start(name: str, target: Callable[..., None], *arguments: Any) -> None:
    """Run ``target`` in a daemon thread that is waited for at exit."""
    thread = threading.Thread(target=_run, args=(target, list(arguments)), name=name, daemon=True)
    with _lock:
        _running.add(thread)
    thread.start()


def _run(target: Callable[..., None], arguments: list[Any]) -> None:
    try:
        target(*arguments)
    finally:
        arguments.clear()
        with _lock:
            _running.discard(threading.current_thread())


def join_all(limit_s: float = EXIT_WAIT_S) -> None:
    """Wait for all of them, but no longer than the limit."""
    end = time.monotonic() + limit_s
    with _lock:
        threads = list(_running)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(join_all)
