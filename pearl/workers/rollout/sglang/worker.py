"""A rollout worker whose engine is an SGLang server under it."""

import argparse
import asyncio
import os
import socket
import sys
import tempfile
from pathlib import Path

from pearl.runtime import mmap_counter
from pearl.types import tcp_address
from pearl.types.config import Config
from pearl.workers.model import resolve_device
from pearl.workers.rollout.comparison import EngineComparison
from pearl.workers.rollout.process import CountTokens, serve_engine
from pearl.workers.rollout.sglang.engine import SglangEngine
from pearl.workers.rollout.sglang.model_files import write_model
from pearl.workers.rollout.sglang.pair_rendezvous import PairRendezvous
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import settings_of
from pearl.workers.weight_transfer.address import advertised_address
from pearl.workers.weight_transfer.receiver import Receiver


async def serve_sglang(options: argparse.Namespace, config: Config, count_tokens: CountTokens | None) -> str:
    """Returns why it ended; raises what made SGLang fail to start, or EngineDiedError when it ended by itself."""
    directory = work_directory()
    host, bind_host = _hosts(options.address)
    settings = settings_of(
        config,
        python=config.sglang.python or sys.executable,
        model_directory=directory / "sglang-model",
        uses_gpu=resolve_device(config.model).type == "cuda",
        log_path=directory / "sglang.log",
    )
    point = None
    if config.elastic.pd != "colocated":
        point = PairRendezvous(bind_host, host, f"rollout.{options.slot}.{options.incarnation}")
    receiver = Receiver(options.slot, options.incarnation, socket.gethostname())
    async with asyncio.TaskGroup() as group:
        engine = SglangEngine(
            settings,
            Server(settings, host),
            lambda: write_model(config.model, options.vocabulary_size, settings.model_directory),
            group,
            start_limit_s=config.runtime.start_timeout_s,
            count_tokens=count_tokens,
            point=point,
            role=options.role,
        )
        try:
            kv_address = "" if point is None else str(point.address)
            comparison = EngineComparison(config, options.vocabulary_size, engine)
            return await serve_engine(options, config, engine, receiver, kv_address, comparison)
        finally:
            await engine.shutdown()


def work_directory() -> Path:
    """Return the directory of the worker's process group, which is removed with the run."""
    path = os.environ.get(mmap_counter.ENVIRONMENT_KEY)
    return Path(path).parent if path else Path(tempfile.mkdtemp(prefix="pearl-sglang-"))


def _hosts(coordinator: str) -> tuple[str, str]:
    """(where others reach this worker, what it listens at)."""
    if tcp_address.parse(coordinator).is_loopback:
        return "127.0.0.1", "127.0.0.1"
    return advertised_address(None, peers_elsewhere=True), "0.0.0.0"
