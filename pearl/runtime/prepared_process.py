"""The node agent's side of the prepared process: one process a host that has imported what workers import.

Groups are forked from it as children of the agent (``pearl.workers.process_server`` says how), so its death costs
nothing but the time that it saves: a group that it does not start is started the usual way, and it is started again.
"""

import asyncio
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import pearl
from pearl.runtime import parent_death, process_markers
from pearl.runtime.forked_child import ForkedChild

SERVER_MODULE = "pearl.workers.process_server"
GROUP_NAME = "prepared-process"
MARKER_BYTES = 256
"""Room for a group's name in the environment that the kernel shows, which no process can make longer."""
UNSAFE_EXIT_CODE = 3
"""It found threads, sockets or a device in itself after its imports, and would again."""
MAX_STARTS = 5
"""A server that keeps dying is given up; groups are then started the usual way."""
FORK_LIMIT_S = 60.0
"""Imports on a busy host included."""
_READ_AT_IMPORT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|TORCH|PYTORCH|HF|TRANSFORMERS|LD|MALLOC|PYTHON)[A-Z_]*"
)

log = logging.getLogger(__name__)


class ForkRequest(msgspec.Struct, frozen=True):
    """A line to the server: become a subreaper with these arguments, environment and output file."""

    group: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    output: str


class ForkReply(msgspec.Struct, frozen=True):
    """The server's line: the pid of the new child of the agent."""

    pid: int


class PreparedProcess:
    """Keeps the server running from the first ``want`` on and has it fork groups."""

    def __init__(self) -> None:
        self._wanted = asyncio.Event()
        self._up = asyncio.Event()  # it runs, or was given up
        self._given_up = False
        self._process: asyncio.subprocess.Process | None = None
        self._environment: dict[str, str] = {}
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Return the server's pid, None while there is none."""
        return None if self._process is None else self._process.pid

    def want(self) -> None:
        """Have it started in the background, unless it was already."""
        self._wanted.set()

    async def keep(self, run_id: str) -> None:
        """Run it until cancelled, starting it again when it dies."""
        await self._wanted.wait()
        self._environment = server_environment(run_id, os.environ)
        try:
            for _ in range(MAX_STARTS):
                if await self._run() == UNSAFE_EXIT_CODE:
                    break
        except OSError as error:
            log.warning("the prepared process cannot be started: %s", error)
        finally:
            self._given_up = True
            self._up.set()
        log.warning("no prepared process on this host any more; workers start without it")

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-m", "pearl.runtime.child_entrypoint", SERVER_MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        self._process = process
        self._up.set()
        log.info("prepared process %d imports what workers need", process.pid)
        try:
            code = await process.wait()
        finally:
            self._up.clear()
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._process = None
        log.info("prepared process %d ended with exit code %d", process.pid, code)
        return code

    async def fork(
        self, group: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> ForkedChild | None:
        """Start a group's subreaper as a child of this process; None when it has to be started the usual way."""
        self.want()
        request = ForkRequest(group, tuple(arguments), dict(environment), str(output))
        try:
            async with asyncio.timeout(FORK_LIMIT_S), self._turn:
                await self._up.wait()
                process = self._process
                if self._given_up or process is None or not self._fits(request):
                    return None
                return await self._exchange(process, request)
        except TimeoutError:
            log.warning("the prepared process did not fork %s within %g s", group, FORK_LIMIT_S)
            return None

    async def _exchange(
        self, process: asyncio.subprocess.Process, request: ForkRequest
    ) -> ForkedChild | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            return ForkedChild(msgspec.json.decode(line, type=ForkReply).pid)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("the prepared process did not fork %s: %s", request.group, error)
            _kill(process)
            return None
        except BaseException:
            _kill(process)  # the answer would be taken for that to the next request
            raise

    def _fits(self, request: ForkRequest) -> bool:
        """Return whether the group's name has room, and its libraries would read at import what the server read."""
        differing = _read_at_import(request.environment) != _read_at_import(self._environment)
        return len(request.group.encode()) < MARKER_BYTES and not differing


def server_environment(run_id: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: no GPU to be seen, and room for the name of any group in its marker."""
    return {
        **common_environment(base),
        "CUDA_VISIBLE_DEVICES": "",
        process_markers.RUN_VARIABLE: run_id,
        process_markers.GROUP_VARIABLE: GROUP_NAME.ljust(MARKER_BYTES, "-"),
        parent_death.PARENT_VARIABLE: str(os.getpid()),
    }


def common_environment(base: Mapping[str, str], wanted: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what all processes that an agent starts have in common, between ``base`` and what is ``wanted``."""
    found = {
        "OMP_NUM_THREADS": "1",
        **base,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else a dead peer of one link ends the whole process
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",  # else torchrun probes for a port that others may take
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of NVML, which our GPU ids follow
        "SPT_NOENV": "1",  # setproctitle would overwrite the environment in which the markers are
        **(wanted or {}),
    }
    package_root = str(Path(pearl.__file__).resolve().parent.parent)
    paths = [package_root, *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return found


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if _READ_AT_IMPORT.match(key)}


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
