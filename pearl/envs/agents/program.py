"""Runs one agent program for one task: its directory, its environment, its output's end, and the end of all of it."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pearl.envs.sandbox import keeper
from pearl.runtime.process_markers import GROUP_VARIABLE, RUN_VARIABLE

MAX_OUTPUT_BYTES = 64 << 10
"""Of standard output and error together; the end is kept, it has the error."""
END_LIMIT_S = 5.0
"""From asking the keeper to end everything to killing it."""
INHERITED = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", RUN_VARIABLE, GROUP_VARIABLE)


class ProgramRun(msgspec.Struct, frozen=True):
    """What a scoring function gets beside the task."""

    exit_code: int  # 128 + N: by signal N; 127: the command was not found
    output: str  # the end of what it wrote
    directory: Path  # where it ran; removed after the scoring
    messages: list[dict[str, Any]]  # the conversation as the gateway recorded it
    truncated: bool  # it reached the limit of context or turns


class Program:
    """``async with``: inside, the program runs; at the end nothing of it is left."""

    def __init__(self, command: Sequence[str], task: Any, settings: Mapping[str, str]) -> None:
        self._command = command
        self._task = task
        self._settings = settings
        self._process: asyncio.subprocess.Process
        self._output = bytearray()
        self._temporary: tempfile.TemporaryDirectory[str]
        self.directory: Path

    async def __aenter__(self) -> "Program":
        self._temporary = tempfile.TemporaryDirectory(prefix="pearl-agent-", ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name)
        task_path = self.directory / "task.json"
        task_path.write_text(json.dumps(self._task), encoding="utf-8")
        work = self.directory / "work"
        work.mkdir()
        inherited = {key: value for key in INHERITED if (value := os.environ.get(key)) is not None}
        own = {"HOME": str(work), "TMPDIR": str(work), "PEARL_TASK": str(task_path)}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                keeper.__file__,
                str(os.getpid()),
                self._temporary.name,
                *self._command,
                cwd=work,
                env={**inherited, **own, **self._settings},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._temporary.cleanup()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()
        self._temporary.cleanup()

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    @property
    def exit_code(self) -> int:
        code = self._process.returncode
        assert code is not None
        return code if code >= 0 else 128 - code

    async def wait(self) -> None:
        """Wait until the program has ended, and with it everything that it started."""
        assert self._process.stdout is not None
        while block := await self._process.stdout.read(1 << 16):
            self._output += block
            del self._output[:-MAX_OUTPUT_BYTES]
        await self._process.wait()

    def terminate(self) -> None:
        """Have it and everything that it started ended; ``wait`` says when."""
        if self._process.returncode is None:
            self._process.terminate()

    async def end(self) -> None:
        """End it and everything that it started, within a limit; harmless when it has ended."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await self.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
