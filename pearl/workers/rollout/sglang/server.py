"""One SGLang server: started as a child of this process, watched, and gone with all its processes when it is stopped.

Its process is told to die with us by the kernel, SGLang's own processes with it; and all carry the markers of the
worker's group, by which the node agent ends what is left of a group.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from pearl.runtime.pidfd import wait_exited
from pearl.runtime.process_markers import open_pidfds, send, with_descendants
from pearl.workers.rollout.protocol import Role
from pearl.workers.rollout.sglang.client import Client, ServerError
from pearl.workers.rollout.sglang.settings import SglangSettings, arguments, environment

log = logging.getLogger(__name__)

KILL_LIMIT_S = 5.0
LOOK_PERIOD_S = 0.25
"""Between two looks whether a server that starts answers yet: it tells nobody."""
LOG_TAIL_BYTES = 2048
SHARED_MEMORY = Path("/dev/shm")


class Server:
    def __init__(self, settings: SglangSettings, host: str = "127.0.0.1") -> None:
        """``host`` is where others reach its stage of a pair."""
        self._settings = settings
        self._host = host
        self._on_death: Callable[[str], None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._files = settings.log_path.with_name("sglang-files")
        self._files_fd = -1
        self.bootstrap_port = 0
        self.client = Client(0)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, role: Role, limit_s: float) -> None:
        """Returns when it answers. ServerError when it does not within the limit, with the end of its log."""
        assert self._process is None, "it runs already"
        self.client = Client(free_port())
        self.bootstrap_port = free_port()
        command = arguments(self._settings, role, self.client.port, self.bootstrap_port)
        with open(self._settings.log_path, "ab") as output:  # noqa: ASYNC230  a log file on this host
            # From the loop's thread: the child is told to die with the thread that started it.
            self._process = subprocess.Popen(  # noqa: ASYNC220  only the start, a matter of milliseconds
                [self._settings.python, "-u", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(self._settings, self._host, self._make_files(), os.environ),
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(limit_s):
                await self._answers()
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise ServerError(f"SGLang did not answer within {limit_s:g} s: {self.log_tail()}") from None
            raise

    def _make_files(self) -> str:
        """A name of the directory, while this process lives, that is short enough for the names of sockets in it."""
        self._files.mkdir(exist_ok=True)
        self._files_fd = os.open(self._files, os.O_PATH | os.O_DIRECTORY)
        return f"/proc/{os.getpid()}/fd/{self._files_fd}"

    async def _answers(self) -> None:
        while True:
            if not self.is_alive:
                assert self._process is not None
                raise ServerError(f"SGLang ended with code {self._process.returncode}: {self.log_tail()}")
            try:
                await self.client.good("GET", "/model_info", limit_s=KILL_LIMIT_S)
                return
            except ServerError:
                await asyncio.sleep(LOOK_PERIOD_S)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Have ``on_death`` told, once, when it ends unasked."""
        assert self._process is not None
        self._on_death = on_death
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _died(self) -> None:
        self.unwatch()
        assert self._process is not None
        assert self._on_death is not None
        code = self._process.poll()
        self._on_death(f"SGLang ended with code {code}: {self.log_tail()}")

    async def stop(self) -> None:
        """End it and all its processes, at once. Harmless when repeated."""
        process = self._process
        if process is None:
            return
        self.unwatch()
        pids = with_descendants([process.pid])
        with open_pidfds(pids) as fds:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also whoever was adopted meanwhile
            send(fds, signal.SIGKILL)
            if not await wait_exited(fds, KILL_LIMIT_S):
                log.error("processes of SGLang do not end on SIGKILL within %g s", KILL_LIMIT_S)
        process.wait(KILL_LIMIT_S)
        self._process = None
        self._remove_files(pids)

    def _remove_files(self, pids: Sequence[int]) -> None:
        os.close(self._files_fd)
        shutil.rmtree(self._files, ignore_errors=True)
        for pid in pids:  # what the ranks of several GPUs share
            for path in SHARED_MEMORY.glob(f"sgl_shm_*_{pid}_*"):
                path.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """Return the last line of SGLang's log that is not part of a traceback, for error messages."""
        try:
            with open(self._settings.log_path, "rb") as file:
                file.seek(max(0, self._settings.log_path.stat().st_size - LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "(it wrote nothing)"


def free_port() -> int:
    """SGLang takes no port 0; whoever takes this one meanwhile makes its start fail, with that in its log."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
