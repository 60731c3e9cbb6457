"""SGLang engines for tests: whether they can run here, servers that whole sessions share, and what they serve."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path

from engine_support import MODEL, VOCABULARY

from pearl.workers.rollout.protocol import Role
from pearl.workers.rollout.sglang.engine import SglangEngine
from pearl.workers.rollout.sglang.meeting import MeetingPoint
from pearl.workers.rollout.sglang.model_files import write_model
from pearl.workers.rollout.sglang.running import CountTokens
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import SglangSettings

PYTHON_VARIABLE = "PEARL_SGLANG_PYTHON"
START_LIMIT_S = 240.0


def python() -> str:
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


@cache
def why_not() -> str:
    """Why no SGLang engine can run here; "" = one can."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    if subprocess.run([python(), "-c", code], capture_output=True, check=False).returncode:
        return (
            f"SGLang is not installed for {python()}: run launch/install-sglang-cpu.sh VENV and set "
            f"{PYTHON_VARIABLE}=VENV/bin/python"
        )
    return ""


def settings_in(directory: Path, **changes: object) -> SglangSettings:
    fields: dict[str, object] = {
        "python": python(),
        "model_directory": directory / "model",
        "dtype": MODEL.dtype,
        "uses_gpu": False,
        "num_gpus": 1,
        "kv_capacity_tokens": 16384,
        "max_running": 32,
        "max_context_tokens": 2048,
        "prefill_chunk_tokens": 512,
        "stream_interval": 1,
        "transfer": "mooncake_tcp",
        "log_path": directory / "sglang.log",
        "options": {},
    }
    return SglangSettings(**(fields | changes))  # type: ignore[arg-type]


@contextmanager
def running_server(role: Role = "colocated", **changes: object) -> Iterator[tuple[Server, SglangSettings]]:
    """A server that outlives event loops."""
    with tempfile.TemporaryDirectory() as name:
        settings = settings_in(Path(name), **changes)
        write_model(MODEL, VOCABULARY, settings.model_directory)
        server = Server(settings)
        asyncio.run(server.start(role, START_LIMIT_S))
        try:
            yield server, settings
        finally:
            asyncio.run(server.stop())


@asynccontextmanager
async def engine_on(
    server: Server,
    settings: SglangSettings,
    role: Role = "colocated",
    point: MeetingPoint | None = None,
    count_tokens: CountTokens | None = None,
) -> AsyncIterator[SglangEngine]:
    """A started engine without weights, as good as new."""
    async with asyncio.TaskGroup() as group:
        engine = SglangEngine(
            settings,
            server,
            lambda: write_model(MODEL, VOCABULARY, settings.model_directory),
            group,
            start_limit_s=START_LIMIT_S,
            count_tokens=count_tokens,
            point=point,
            role=role,
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.shutdown()
