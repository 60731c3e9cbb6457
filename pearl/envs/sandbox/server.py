"""``python -I -S server.py [isolated]``: runs inside the sandbox and does what it is asked over its standard streams.

A frame is a length (four bytes), a JSON object of that length with ``size``, and ``size`` bytes. Whatever a command
leaves running ends with it. Isolated means process 1 of a namespace of its own: then the processes of a command are
watched together, and can neither signal this process nor read its memory or its pipes. Imports nothing of PEARL.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from keeper import PR_SET_CHILD_SUBREAPER, end_descendants  # type: ignore[import-not-found]

PR_SET_DUMPABLE = 4
WATCH_S = 0.02
"""Between two looks at what a command's processes use together."""
NOT_FOUND = 127


class Limits:
    def __init__(self, given: dict[str, int], isolated: bool) -> None:
        self.isolated = isolated
        self.memory_bytes, self.disk_bytes = given["memory_bytes"], given["disk_bytes"]
        self.processes, self.output_bytes = given["processes"], given["output_bytes"]
        self.read_bytes = given["read_bytes"]

    def apply(self, seconds: float) -> None:
        """Apply the limits to a command, before it begins."""
        limits = {
            resource.RLIMIT_AS: self.memory_bytes,
            resource.RLIMIT_FSIZE: self.disk_bytes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 256,
            resource.RLIMIT_CPU: int(seconds) + 2,
        }
        for which, value in limits.items():
            resource.setrlimit(which, (value, value))


class Output:
    """The beginning and the end of a flood."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self.cut = 0

    def add(self, block: bytes) -> None:
        room = self._half - len(self._head)
        self._head += block[:room]
        self._tail += block[max(room, 0) :]
        excess = len(self._tail) - self._half
        if excess > 0:
            self.cut += excess
            del self._tail[:excess]

    def content(self) -> bytes:
        return bytes(self._head + self._tail)


def execute(request: dict[str, Any], limits: Limits) -> tuple[dict[str, Any], bytes]:
    timeout_s = request["timeout_s"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.getcwd(), "TMPDIR": os.getcwd(), "LANG": "C.UTF-8"}
    try:
        process = subprocess.Popen(
            request["argv"],
            env=environment | request["env"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: limits.apply(timeout_s),
        )
    except (OSError, ValueError) as error:
        return {"exit_code": NOT_FOUND}, f"{request['argv'][0]}: {error}\n".encode(errors="replace")
    output, outcome = Output(limits.output_bytes), {"timed_out": False, "exceeded": ""}
    assert process.stdout is not None
    _follow(process, output, outcome, time.monotonic() + timeout_s, limits)
    if process.poll() is None:
        process.kill()
    if (
        limits.isolated
    ):  # at one moment, or a fork bomb would be quicker; all but this process in its namespace
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    code = process.wait()
    end_descendants()
    process.stdout.close()
    return {
        "exit_code": code if code >= 0 else 128 - code,
        "cut_bytes": output.cut,
        **outcome,
    }, output.content()


def _follow(
    process: "subprocess.Popen[bytes]", output: Output, outcome: dict[str, Any], end: float, limits: Limits
) -> None:
    """Watch the command until it has ended, or has to be. Its output may stay open longer, in what it left
    running."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    next_look = 0.0
    is_open = True
    while True:
        has_ended = process.poll() is not None
        ready = select.select([pipe], [], [], 0 if has_ended else WATCH_S)[0] if is_open else []
        if ready:
            block = os.read(pipe, 1 << 16)
            is_open = bool(block)
            output.add(block)
        elif has_ended:
            return
        elif not is_open:
            time.sleep(WATCH_S)
        now = time.monotonic()
        if limits.isolated and now >= next_look:
            next_look = now + WATCH_S
            if exceeded := _exceeded(limits):
                outcome["exceeded"] = exceeded
                return
        if now >= end:
            outcome["timed_out"] = not has_ended
            return


def _exceeded(limits: Limits) -> str:
    """Return which limit all processes of this namespace together exceed."""
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if len(pids) > limits.processes:
        return "processes"
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                pages += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return "memory" if pages * resource.getpagesize() > limits.memory_bytes else ""


def read(request: dict[str, Any], limits: Limits) -> tuple[dict[str, Any], bytes]:
    fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = file.read(limits.read_bytes + 1)
    if len(content) > limits.read_bytes:
        raise OSError(errno.EFBIG, f"is larger than {limits.read_bytes} bytes")
    return {}, content


def write(request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    path = request["path"]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o755)
    with open(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        file.write(content)
    return {}, b""


def main(isolated: bool) -> None:
    assert not isolated or os.getpid() == 1, "all processes of this namespace would be killed"
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    limits = None
    while header := requests.read(4):
        request = json.loads(requests.read(struct.unpack(">I", header)[0]))
        content = requests.read(request["size"])
        limits = limits or Limits(request["limits"], isolated)
        try:
            match request["op"]:
                case "exec":
                    reply, payload = execute(request, limits)
                case "read":
                    reply, payload = read(request, limits)
                case _:
                    reply, payload = write(request, content)
        except (OSError, ValueError) as error:
            code = error.errno if isinstance(error, OSError) else errno.EINVAL
            text = error.strerror if isinstance(error, OSError) else str(error)
            reply, payload = {"errno": code or errno.EIO, "error": text or str(error)}, b""
        encoded = json.dumps(reply | {"size": len(payload)}).encode()
        replies.write(struct.pack(">I", len(encoded)) + encoded + payload)
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1:] == ["isolated"])
