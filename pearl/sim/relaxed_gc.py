"""Garbage collection while simulating: nearly all that is made is freed by its count, so looking for cycles is rare."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = (200_000, 20, 20)


@contextmanager
def relaxed_gc() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
