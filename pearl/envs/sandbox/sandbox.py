"""One sandbox: started, asked and closed. At its end, however it comes, nothing of it is left."""

import asyncio
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pearl.envs.sandbox import keeper, server
from pearl.envs.sandbox.limits import ExecResult, Kind, SandboxError, SandboxLimits
from pearl.runtime.process_markers import GROUP_VARIABLE, RUN_VARIABLE

ANSWER_MARGIN_S = 10.0
"""Beyond a command's own limit, which the sandbox keeps; past it the sandbox itself is at fault."""
END_LIMIT_S = 5.0
MAX_HEADER_BYTES = 1 << 20
WORK = "/work"
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""Of the host, with bubblewrap, besides the interpreter's own prefix."""


class Sandbox:
    """``async with``, or ``start`` and ``close``. One command runs at a time; others wait."""

    def __init__(self, kind: Kind, limits: SandboxLimits | None = None) -> None:
        self._kind: Kind = kind
        self._limits = limits or SandboxLimits()
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> "Sandbox":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """SandboxError when it cannot be started."""
        assert self._process is None
        marks = {key: value for key in (RUN_VARIABLE, GROUP_VARIABLE) if (value := os.environ.get(key))}
        path = os.environ.get("PATH", "/usr/bin:/bin")
        if self._kind == "subprocess":
            self._directory = tempfile.TemporaryDirectory(prefix="pearl-sandbox-", ignore_cleanup_errors=True)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-I", "-S", keeper.__file__, str(os.getpid())],
                self._directory.name if self._directory else "",
                *self._command(),
                cwd=self._directory.name if self._directory else "/",
                env={"PATH": path} | marks,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            await self.exec(["true"], timeout_s=END_LIMIT_S)
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise SandboxError(f"{self._kind}: cannot be started: {error}") from error
            raise

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command; what it leaves running ends with it. SandboxError when the sandbox does not answer."""
        request = {"op": "exec", "argv": list(argv), "env": dict(env or {}), "timeout_s": timeout_s}
        reply, output = await self._ask(request, b"", timeout_s)
        return msgspec.convert({**reply, "output": output}, ExecResult)

    async def read(self, path: str) -> bytes:
        """A regular file's content. OSError when there is none or it is too large."""
        _, content = await self._ask({"op": "read", "path": path}, b"", 0.0)
        return content

    async def write(self, path: str, content: bytes) -> None:
        """Make or replace a file, and its directories. OSError when that cannot be."""
        await self._ask({"op": "write", "path": path}, content, 0.0)

    async def close(self) -> None:
        """End the sandbox. Repeated calls do nothing."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        if self._directory is not None:
            self._directory.cleanup()

    def _command(self) -> list[str]:
        python = [os.path.realpath(sys.executable), "-I", "-S"]
        if self._kind == "subprocess":
            return [*python, server.__file__]
        return [*_bubblewrap(self._limits), *python, "/sandbox/server.py", "isolated"]

    async def _ask(
        self, request: dict[str, Any], content: bytes, limit_s: float
    ) -> tuple[dict[str, Any], bytes]:
        async with self._turn:
            process = self._process
            if process is None:
                raise SandboxError(f"{self._kind}: is closed")
            limits = msgspec.to_builtins(self._limits)
            header = json.dumps({**request, "size": len(content), "limits": limits}).encode()
            try:
                async with asyncio.timeout(limit_s + ANSWER_MARGIN_S):
                    assert process.stdin is not None
                    process.stdin.write(struct.pack(">I", len(header)) + header + content)
                    await process.stdin.drain()
                    reply, payload = await self._reply(process)
            except (TimeoutError, ConnectionError, EOFError, ValueError) as error:
                raise SandboxError(
                    f"{self._kind}: does not answer: {await _last_words(process) or error!r}"
                ) from error
            except BaseException:
                # Cancelled between a question and its answer: the next one would get this answer.
                process.terminate()
                raise
        if "errno" in reply:
            raise OSError(reply["errno"], reply["error"], request.get("path"))
        return reply, payload

    async def _reply(self, process: asyncio.subprocess.Process) -> tuple[dict[str, Any], bytes]:
        """ValueError for what the server never says."""
        assert process.stdout is not None
        (length,) = struct.unpack(">I", await process.stdout.readexactly(4))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        reply = json.loads(await process.stdout.readexactly(length))
        size = reply.pop("size")
        if not 0 <= size <= max(self._limits.read_bytes, self._limits.output_bytes):
            raise ValueError(f"an answer of {size} bytes")
        return reply, await process.stdout.readexactly(size)


def _bubblewrap(limits: SandboxLimits) -> list[str]:
    """Everything is read-only but the work directory; nothing of the host's users, processes or networks is there."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bubblewrap: there is no program bwrap on PATH; install it (Debian: bubblewrap)")
    prefix = os.path.realpath(sys.base_prefix)
    shown = [*READABLE, *([] if prefix.startswith("/usr") else [prefix])]
    arguments = [program, "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
    arguments += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    arguments += ["--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    for path in shown:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    arguments += ["--ro-bind", str(Path(server.__file__).parent), "/sandbox"]
    arguments += ["--size", str(limits.disk_bytes), "--tmpfs", WORK, "--symlink", WORK, "/tmp"]
    arguments += ["--size", "1048576", "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*arguments, "--setenv", "PATH", f"{prefix}/bin:/usr/bin:/bin", "--chdir", WORK, "--"]


async def _last_words(process: asyncio.subprocess.Process) -> str:
    """Return what the process wrote to standard error, after it has been ended."""
    await _end(process)
    assert process.stderr is not None
    return (await process.stderr.read(4096)).decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(END_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
