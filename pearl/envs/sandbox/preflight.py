"""Finds out before a run whether sandboxes of a kind work here: one is really started and tried."""

import asyncio
import tempfile

from pearl.envs.sandbox.limits import Kind, SandboxError
from pearl.envs.sandbox.sandbox import Sandbox

LIMIT_S = 10.0


def preflight(kind: Kind) -> None:
    """Start a sandbox and try what it promises; not to be called from a running event loop.

    Raises:
        ValueError: it does not work here; says why and what else there is.
    """
    try:
        asyncio.run(_try(kind))
    except (SandboxError, OSError) as error:
        raise ValueError(
            f'sandbox "{kind}" does not work here: {error}. Where user namespaces are forbidden, bubblewrap cannot '
            'work; "subprocess" works everywhere and isolates nothing'
        ) from error


async def _try(kind: Kind) -> None:
    async with Sandbox(kind) as sandbox:
        await sandbox.write("probe.txt", b"probe")
        result = await sandbox.exec(["cat", "probe.txt"], timeout_s=LIMIT_S)
        if (result.exit_code, result.output) != (0, b"probe"):
            raise SandboxError(f"a command in it gave {result}")
        if kind == "subprocess":
            return
        with tempfile.NamedTemporaryFile() as outside:
            if (await sandbox.exec(["ls", outside.name], timeout_s=LIMIT_S)).exit_code == 0:
                raise SandboxError("the host's files are visible in it")
        for path in ("/usr/probe", "/probe", "/dev/probe"):
            if (await sandbox.exec(["touch", path], timeout_s=LIMIT_S)).exit_code == 0:
                raise SandboxError(f"{path} can be written in it")
        interfaces = await sandbox.exec(["cat", "/proc/net/dev"], timeout_s=LIMIT_S)
        names = [line.split(b":")[0].strip() for line in interfaces.output.splitlines()[2:]]
        if names not in ([b"lo"], []):
            raise SandboxError(f"it sees the networks {b', '.join(names).decode()}")
