"""``python -m pearl.workers.process_server``: the prepared process of a host, from which its torch groups are forked.

It imports once what launchers and ranks import, touches no device, has one thread and no socket, and waits for
requests of its node agent on stdin. Each is answered by a fork whose parent is the agent (``CLONE_PARENT``), which is
then a group's subreaper as if the agent had started it; the server's own death touches no group.
"""

import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from pearl.runtime import process_markers, subreaper
from pearl.runtime.prepared_process import MARKER_BYTES, UNSAFE_EXIT_CODE, ForkReply, ForkRequest
from pearl.workers.forked_main import end_after, take_environment

ENTRY_MODULES = (
    "pearl.workers.forking_launcher",
    "pearl.workers.rollout.worker",
    "pearl.workers.training.worker",
)
"""Imported, then forgotten: each is run as a main module later, with all that it imports in memory."""
MODULES = (
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "transformers.models.qwen3.modeling_qwen3",
    "psutil",
)
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT = 0x8000  # linux/sched.h


class Marker:
    """The group's name in the environment that ``/proc`` shows, which lies where the process found it at its start."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        self._address = libc.getenv(process_markers.GROUP_VARIABLE.encode())
        assert self._address is not None

    def write(self, group: str) -> None:
        """Show ``group`` from now on, here and in what is forked."""
        name = group.encode()
        assert len(name) < MARKER_BYTES
        ctypes.memmove(self._address, name.ljust(MARKER_BYTES, b"\0"), MARKER_BYTES)


def main() -> None:
    marker = Marker()
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)}
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)  # what an import prints is no reply
    _import_all()
    if problem := _problem(own):
        sys.stderr.write(f"no group is forked from the prepared process: {problem}\n")
        sys.exit(UNSAFE_EXIT_CODE)
    gc.collect()
    gc.freeze()  # else each child's first collection copies the pages of all objects
    for line in requests:
        request = msgspec.json.decode(line, type=ForkRequest)
        marker.write(request.group)
        pid = _clone()
        if pid == 0:
            _become_group(request)
        marker.write("")
        if pid < 0:
            sys.exit("the prepared process could not fork")
        os.write(replies, msgspec.json.encode(ForkReply(pid)) + b"\n")


def _import_all() -> None:
    for name in (*MODULES, *ENTRY_MODULES):
        importlib.import_module(name)
    for name in ENTRY_MODULES:
        del sys.modules[name]


def _problem(own: Collection[str]) -> str:
    """Return why forks of this process would be unsafe; "" when they are not. ``own`` are the files that it was given,
    sockets under uvloop."""
    if os.uname().machine not in SYS_CLONE:
        return f"CLONE_PARENT is not known for {os.uname().machine}"
    if not callable(getattr(SubprocessHandler, "_popen", None)):
        return "this version of torchrun starts ranks in another way"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"its imports have started {threads - 1} threads"
    if opened := unsafe_files(own):
        return f"its imports have opened {', '.join(opened)}"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        if "libcuda.so" in maps.read():
            return "its imports have loaded the CUDA driver"
    return ""


def unsafe_files(own: Collection[str]) -> list[str]:
    """Return the open sockets and devices that are not among ``own``."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name not in own and name.startswith(("/dev/nvidia", "socket:"))]


def _clone() -> int:
    """Fork a child of this process's parent. The GIL is held: the child's only thread needs it."""
    libc = ctypes.PyDLL(None, use_errno=True)
    number = SYS_CLONE[os.uname().machine]
    return int(libc.syscall(number, CLONE_PARENT | int(signal.SIGCHLD), 0, 0, 0, 0))


def _become_group(request: ForkRequest) -> NoReturn:
    """Turn into the group's subreaper. The C library still takes this thread for its parent's, so all it does is to
    wait; the launcher is a plain fork of it, which puts that right."""
    end_after(lambda: _run(request.environment, request.output, request.arguments))


def _run(environment: dict[str, str], output: str, arguments: Sequence[str]) -> None:
    os.setsid()
    null, log = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
    )
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    take_environment(environment)
    subreaper.main(arguments)


if __name__ == "__main__":
    main()
