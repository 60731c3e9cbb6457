"""SGLang engines for tests: whether they can run here, servers that whole sessions share, and what they serve."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path

import psutil
from engine_support import MODEL, VOCABULARY

from pearl.types.config import ModelConfig
from pearl.workers.rollout.protocol import Role
from pearl.workers.rollout.sglang.engine import SglangEngine
from pearl.workers.rollout.sglang.model_files import write_model
from pearl.workers.rollout.sglang.pair_rendezvous import PairRendezvous
from pearl.workers.rollout.sglang.request_manager import CountTokens
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
    if _complaint(code) is not None:
        return (
            f"SGLang is not installed for {python()}: run launch/install-sglang-cpu.sh VENV and set "
            f"{PYTHON_VARIABLE}=VENV/bin/python"
        )
    return ""


@cache
def why_no_pairs() -> str:
    """Why no prefill-decode pair can run here; "" = one can."""
    if reason := why_not():
        return reason
    complaint = _complaint("import mooncake.engine")
    if complaint is not None:
        return (
            "SGLang's KV transfer lacks a library of the system; install libibverbs1, librdmacm1 and libnuma1, which "
            f"launch/install-sglang-cpu.sh does as root where apt is: {complaint}"
        )
    return ""


def _complaint(code: str) -> str | None:
    """Of SGLang's interpreter; None when the code runs to its end."""
    result = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=False)
    return (result.stderr.strip().splitlines() or [""])[-1] if result.returncode else None


def shared_memory(pid: int) -> set[str]:
    """Files of shared memory that it maps."""
    maps = psutil.Process(pid).memory_maps(grouped=True)
    return {entry.path for entry in maps if entry.path.startswith("/dev/shm/")}


def existing(paths: set[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


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
def running_servers(
    *roles: Role,
    model: ModelConfig = MODEL,
    vocabulary_size: int = VOCABULARY,
    max_context_tokens: int = 2048,
) -> Iterator[list[tuple[Server, SglangSettings]]]:
    """Servers that wait_exited event loops, all started at once."""
    with tempfile.TemporaryDirectory() as name:
        found = []
        for index, _ in enumerate(roles):
            directory = Path(name) / str(index)
            directory.mkdir()
            settings = settings_in(directory, max_context_tokens=max_context_tokens)
            write_model(model, vocabulary_size, settings.model_directory)
            found.append((Server(settings), settings))
        try:
            asyncio.run(_start([server for server, _ in found], roles))
            yield found
        finally:
            for server, _ in found:
                asyncio.run(server.stop())


async def _start(servers: Sequence[Server], roles: Sequence[Role]) -> None:
    async with asyncio.TaskGroup() as group:
        for server, role in zip(servers, roles, strict=True):
            group.create_task(server.start(role, START_LIMIT_S))


@asynccontextmanager
async def engine_on(
    server: Server,
    settings: SglangSettings,
    role: Role = "colocated",
    point: PairRendezvous | None = None,
    count_tokens: CountTokens | None = None,
    model: ModelConfig = MODEL,
    vocabulary_size: int = VOCABULARY,
) -> AsyncIterator[SglangEngine]:
    """A started engine without weights, as good as new."""
    async with asyncio.TaskGroup() as group:
        engine = SglangEngine(
            settings,
            server,
            lambda: write_model(model, vocabulary_size, settings.model_directory),
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
