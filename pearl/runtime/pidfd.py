"""Waits for processes to end by their pidfds, which become readable then: no polling, no signal handlers."""

import asyncio
from collections.abc import Sequence


async def wait_exited(pidfds: Sequence[int], limit_s: float) -> bool:
    """True once all processes have ended; False when some are still there after ``limit_s``."""
    loop = asyncio.get_running_loop()
    remaining = set(pidfds)
    all_gone = asyncio.Event()

    def ended(fd: int) -> None:
        loop.remove_reader(fd)
        remaining.discard(fd)
        if not remaining:
            all_gone.set()

    for fd in pidfds:
        loop.add_reader(fd, ended, fd)
    try:
        async with asyncio.timeout(limit_s):
            while remaining:
                await all_gone.wait()
        return True
    except TimeoutError:
        return False
    finally:
        for fd in remaining:
            loop.remove_reader(fd)
