"""A child of this process that another process has forked for it: it is waited for as one that asyncio has started."""

import asyncio
import os


class ForkedChild:
    """Reaps the child when it ends, so its pid is never another's before ``returncode`` is known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # -N = ended by signal N
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Wait until it has ended; any number of tasks may."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()
