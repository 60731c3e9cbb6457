"""Fixture's other half of ``group_member``: knows which members came up and sees each of them end."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from pearl.types.messages.control import StartGroup

LIMIT_S = 30.0  # for anything a test waits for; only a failing test gets there


class Members:
    """Members that reported, by the name they gave."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pids: dict[str, int] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self._ended: set[str] = set()
        self._changed = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if line := await reader.readline():  # else it was ended before it could say anything
                await self._follow(json.loads(line), reader)
        finally:
            writer.close()

    async def _follow(self, report: dict[str, Any], reader: asyncio.StreamReader) -> None:
        async with self._changed:
            self.reports[report["who"]] = report
            self.pids[report["who"]] = report["pid"]
            self._changed.notify_all()
        await reader.read()
        async with self._changed:
            self._ended.add(report["who"])
            self._changed.notify_all()

    async def up(self, *names: str, limit_s: float = LIMIT_S) -> None:
        await self._until(lambda: set(names) <= self.pids.keys(), limit_s)

    async def ended(self, *names: str) -> None:
        await self._until(lambda: set(names) <= self._ended)

    def living(self) -> set[str]:
        return self.pids.keys() - self._ended

    async def _until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        async with asyncio.timeout(limit_s), self._changed:
            await self._changed.wait_for(condition)

    def spec(self, behaviour: str, directory: Path, *, group: str = "group.0.1", **more: Any) -> StartGroup:
        """A group whose process is a ``group_member``."""
        environment = {"PYTHONPATH": str(Path(__file__).parent)} | more.pop("environment", {})
        arguments = (str(self.socket), behaviour)
        fields = {"num_processes": 0, "arguments": arguments, "module": "group_member"} | more
        fields |= {"group": group, "environment": environment, "log_directory": str(directory)}
        return msgspec.convert(fields, StartGroup)


@asynccontextmanager
async def watch_members() -> AsyncIterator[Members]:
    with tempfile.TemporaryDirectory() as directory:  # socket paths must be short
        members = Members(Path(directory) / "s")
        server = await asyncio.start_unix_server(members.serve, members.socket)
        try:
            yield members
        finally:
            server.close()
