"""What an SGLang server is started with: its arguments and its environment. Pure but for the paths beside it."""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.types.config import Config
from pearl.workers.rollout.protocol import Role

HERE = Path(__file__).resolve().parent
SERVER_PATH = HERE / "server_path"
CPU_PATH = HERE / "cpu_path"
LOADER = "pearl_on_server.load"
FILES_VARIABLE = "PEARL_SGLANG_FILES"
"""Tells what is on the server's path the directory for SGLang's files."""
MEMORY_FRACTION_CPU = 0.6
"""SGLang subtracts what other processes hold; with less it finds no room for the KV it was asked for."""
CONTEXT_MARGIN = 16
"""Tokens of room beside the longest trajectory: SGLang refuses a request that would just fit."""
HALF_LIMIT_S = 10
"""Within which the stages of a pair must have found each other and the KV must be over, on a busy host too. SGLang
holds an old address of a peer that has switched its role until then, and drops it with the request."""
HELD_KV_LIMIT_S = 4
"""For which SGLang holds KV of a transfer that failed; it is not idle until then."""

_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
"""Of the worker's own group: SGLang would look for its ranks and its store there, and wait."""


@dataclass(frozen=True, slots=True)
class SglangSettings:
    python: str
    model_directory: Path  # config.json alone: weights come with an update
    dtype: str
    uses_gpu: bool
    num_gpus: int
    kv_capacity_tokens: int
    max_running: int
    max_context_tokens: int
    prefill_chunk_tokens: int
    stream_interval: int
    transfer: str
    log_path: Path
    options: Mapping[str, int | float | str | bool]


def settings_of(
    config: Config, *, python: str, model_directory: Path, uses_gpu: bool, log_path: Path
) -> SglangSettings:
    rollout, sglang = config.rollout, config.sglang
    return SglangSettings(
        python=python,
        model_directory=model_directory,
        dtype=config.model.dtype,
        uses_gpu=uses_gpu,
        num_gpus=rollout.gpus_per_worker,
        kv_capacity_tokens=rollout.kv_capacity_tokens,
        max_running=rollout.max_requests_per_worker,
        max_context_tokens=rollout.max_context_tokens,
        prefill_chunk_tokens=rollout.prefill_chunk_tokens,
        stream_interval=sglang.stream_interval,
        transfer=_transfer(sglang.transfer, uses_gpu),
        log_path=log_path,
        options=sglang.options,
    )


def _transfer(named: str, uses_gpu: bool) -> str:
    if named != "auto":
        return named
    return "mooncake" if uses_gpu else "mooncake_tcp"


def arguments(settings: SglangSettings, role: Role, port: int, bootstrap_port: int) -> list[str]:
    """Return the arguments after the interpreter: the launcher and all of SGLang's options."""
    options: dict[str, Any] = {
        "model-path": settings.model_directory,
        "load-format": "dummy",
        "dtype": settings.dtype,
        "device": "cuda" if settings.uses_gpu else "cpu",
        "host": "127.0.0.1",
        "port": port,
        "tp-size": settings.num_gpus,
        "max-total-tokens": settings.kv_capacity_tokens,
        "max-running-requests": settings.max_running,
        "context-length": settings.max_context_tokens + CONTEXT_MARGIN,
        "chunked-prefill-size": settings.prefill_chunk_tokens,
        "stream-interval": settings.stream_interval,
        "custom-weight-loader": LOADER,
        "log-level": "warning",
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "incremental-streaming-output": True,
        "enable-memory-saver": True,
        "sleep-on-idle": True,  # else an idle scheduler takes a core
    }
    if not settings.uses_gpu:
        options["mem-fraction-static"] = MEMORY_FRACTION_CPU
    if role != "colocated":
        options |= _stage_options(settings, role, bootstrap_port)
    return [str(SERVER_PATH / "pearl_launch.py"), str(os.getpid()), *_flags(options | dict(settings.options))]


def _stage_options(settings: SglangSettings, role: Role, bootstrap_port: int) -> dict[str, Any]:
    return {
        "disaggregation-mode": role,
        "disaggregation-transfer-backend": settings.transfer,
        "disaggregation-bootstrap-port": bootstrap_port,
        "enable-pd-role-switch": settings.transfer.startswith("mooncake"),
        # Not pinned host memory where there is no GPU; retracted KV waits in ordinary memory there.
        "disaggregation-decode-retraction-backup": None if settings.uses_gpu else "cpu_tensor",
        # On every stage: one that was started for prefill with its cache on and decodes later would die of an abort.
        "disaggregation-decode-enable-radix-cache": True,
    }


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if value is True:
            yield f"--{key}"
        elif value is not None and value is not False:
            yield from (f"--{key}", str(value))


def environment(settings: SglangSettings, host: str, files: str, base: Mapping[str, str]) -> dict[str, str]:
    """``host`` is where other workers' stages reach this one, ``files`` a directory for what SGLang leaves behind."""
    paths = [SERVER_PATH] if settings.uses_gpu else [SERVER_PATH, CPU_PATH]
    found = {
        **{key: value for key, value in base.items() if not _TORCHRUN.fullmatch(key)},
        # Only ours: what the worker's interpreter imports need not fit SGLang's.
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        # Sockets and shared files, which it does not remove when it is killed; not what its compilers keep for later.
        "TMPDIR": files,
        FILES_VARIABLE: files,
        "TORCHINDUCTOR_CACHE_DIR": base.get("TORCHINDUCTOR_CACHE_DIR") or _compiled(),
        "SGLANG_HOST_IP": host,
        "HOST_IP": host,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(HALF_LIMIT_S),
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(HALF_LIMIT_S),
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(HELD_KV_LIMIT_S),
    }
    if not settings.uses_gpu:
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        found.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "pearl_models")
        if settings.num_gpus > 1:
            found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(settings.num_gpus)))
    return found


def _compiled() -> str:
    """Return the directory in which torch keeps compiled kernels by default."""
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
