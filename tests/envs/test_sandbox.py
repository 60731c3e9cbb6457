"""Sandboxes: one contract for each kind, and what a model might try in one that isolates."""

import asyncio
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from pearl.envs.sandbox import Kind, Sandbox, SandboxError, SandboxLimits, preflight

LIMITS = SandboxLimits(
    memory_bytes=200 << 20, disk_bytes=4 << 20, processes=20, output_bytes=4096, read_bytes=1 << 20
)


def _works(kind: Kind) -> bool:
    try:
        preflight(kind)
    except ValueError:
        return False
    return True


needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None or not _works("bubblewrap"), reason="bubblewrap does not work on this host"
)
KINDS = ["subprocess", pytest.param("bubblewrap", marks=needs_bubblewrap)]


@pytest.fixture(params=KINDS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with Sandbox(request.param, LIMITS) as started:
        yield started


@pytest.fixture
async def isolated() -> AsyncIterator[Sandbox]:
    async with Sandbox("bubblewrap", LIMITS) as started:
        yield started


async def shell(sandbox: Sandbox, command: str, timeout_s: float = 10.0) -> str:
    return (await sandbox.exec(["sh", "-c", command], timeout_s=timeout_s)).output.decode(errors="replace")


async def test_commands_and_files(sandbox: Sandbox) -> None:
    await sandbox.write("a/b.bin", bytes(range(256)))
    assert await sandbox.read("a/b.bin") == bytes(range(256))
    result = await sandbox.exec(
        ["sh", "-c", "echo out; echo err >&2; echo $WORD; exit 3"], timeout_s=10, env={"WORD": "é"}
    )
    assert (result.exit_code, result.output) == (3, "out\nerr\né\n".encode())
    assert (await sandbox.exec(["no-such-program"], timeout_s=10)).exit_code == 127
    assert (await sandbox.exec(["sh", "-c", "kill -9 $$"], timeout_s=10)).exit_code == 137
    assert await shell(sandbox, "cat a/b.bin | wc -c") == "256\n"
    with pytest.raises(FileNotFoundError):
        await sandbox.read("none")
    with pytest.raises(IsADirectoryError):
        await sandbox.write("a", b"")
    await shell(sandbox, "mkfifo fifo")
    with pytest.raises(OSError, match="no regular file"):
        await sandbox.read("fifo")


async def test_time_and_output_and_files_are_bounded(sandbox: Sandbox) -> None:
    began = time.monotonic()
    result = await sandbox.exec(["sh", "-c", "echo begin; yes & sleep 600"], timeout_s=0.3)
    assert time.monotonic() - began < 5
    assert (result.timed_out, len(result.output), result.output[:6]) == (True, 4096, b"begin\n")
    assert result.cut_bytes > 0
    await shell(sandbox, "head -c 5000000 /dev/zero > big")
    with pytest.raises(OSError, match="larger than 1048576 bytes"):
        await sandbox.read("big")
    assert int(await shell(sandbox, "stat -c %s big")) <= LIMITS.disk_bytes


async def test_what_a_command_leaves_running_ends_with_it(sandbox: Sandbox) -> None:
    pid = await shell(sandbox, "setsid sh -c 'echo $$; exec sleep 600 >/dev/null 2>&1' & sleep 0.2")
    assert pid.strip().isdigit()
    assert "No such process" in await shell(sandbox, f"kill -0 {pid.strip()} 2>&1 || echo No such process")


async def test_a_cancelled_command_takes_the_sandbox_with_it(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await sandbox.exec(["sleep", "600"], timeout_s=600)
    with pytest.raises(SandboxError, match="does not answer"):
        await sandbox.exec(["true"], timeout_s=10)
    await sandbox.close()
    with pytest.raises(SandboxError, match="is closed"):
        await sandbox.read("x")


@needs_bubblewrap
@pytest.mark.parametrize(
    ("attack", "outcome"),
    [
        ("python3 -c 'import os\nwhile True: os.fork()'", "processes"),
        ("b() { b | b & }; b; sleep 600", "processes"),
        (
            "for i in 1 2 3 4 5; do python3 -c 'x = b\"1\" * (60 << 20); import time; time.sleep(600)' & done; wait",
            "memory",
        ),
        ("python3 -c 'x = bytearray(1 << 30)'", "MemoryError"),
        ("cat /dev/zero > /work/full", "File size limit|No space left"),
        ("for i in 1 2 3 4 5 6; do head -c 1M /dev/zero > f$i; done", "No space left"),
        ("head -c 9M /dev/zero > /dev/shm/full", "No space left|File size"),
        (
            "echo x > /dev/full2; echo x > /usr/x; echo x > /x; echo x > /sandbox/server.py",
            "Read-only file system",
        ),
        ("kill -9 1; kill -9 -1; echo alive", "Killed|alive|^$"),
        ("cat /proc/1/environ", "Permission denied"),
        ("echo forged > /proc/1/fd/1", "Permission denied"),
        ("ls /root/.ssh /home /var/log /etc/shadow", "No such file"),
        (
            "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 22), 2)'",
            "refused|unreachable",
        ),
        ("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' \\n'", "^(lo)?$"),
        ("ln -s /etc/shadow link; cat link", "No such file"),
        ("mount -t tmpfs none /work", "denied|permitted|must be superuser|mount"),
        ("su -c id; id -u", "1000"),
        ("ls /proc | grep -c '^[0-9]'", "^[1-9]$"),
    ],
)
async def test_an_attack_hurts_only_itself(isolated: Sandbox, attack: str, outcome: str) -> None:
    began = time.monotonic()
    result = await isolated.exec(["sh", "-c", attack], timeout_s=20)
    assert time.monotonic() - began < 15
    text = result.exceeded or result.output.decode(errors="replace").strip()
    if result.exit_code == 137 and not text:
        text = "Killed"
    assert re.search(outcome, text), (result, text)
    assert await shell(isolated, "echo still here; ls /proc | grep -c '^[0-9]'") in (
        "still here\n4\n",
        "still here\n3\n",
    )


@needs_bubblewrap
async def test_a_link_out_of_the_sandbox_leads_nowhere(isolated: Sandbox) -> None:
    await shell(isolated, f"ln -s {__file__} link; ln -s /usr/evil out")
    with pytest.raises(FileNotFoundError):
        await isolated.read("link")
    with pytest.raises(OSError, match="Read-only"):
        await isolated.write("out", b"x")


@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_leaves_nothing(kind: Kind, tmp_path: Path) -> None:
    """Of the process that holds the sandbox, while a command runs."""
    holder = (
        "import asyncio, sys\nfrom pearl.envs.sandbox import Sandbox\n"
        "async def main():\n"
        f"    async with Sandbox({kind!r}) as sandbox:\n"
        "        print(sandbox._process.pid, flush=True)\n"
        "        await sandbox.exec(['sh', '-c', 'setsid sleep 600 & sleep 600'], timeout_s=600)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        keeper = int(process.stdout.readline())
        ended = os.pidfd_open(keeper)
        while not _descendants(keeper):
            time.sleep(0.01)
        below = _descendants(keeper)
        process.kill()
        assert select.select([ended], [], [], 20.0)[0]  # the keeper ends last
        os.close(ended)
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
    assert list(tmp_path.iterdir()) == []


def _descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_where_it_does_not_work_it_says_why_and_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ValueError, match=r'"bubblewrap" does not work here.*no program bwrap.*"subprocess" works'
    ):
        preflight("bubblewrap")


def test_the_reason_is_what_bubblewrap_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bwrap"
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ValueError, match="No permissions to create new namespace"):
        preflight("bubblewrap")
