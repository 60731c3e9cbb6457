"""``python -m pearl.workers.rollout.worker`` under torchrun: one rollout worker; rank 0 owns control and the engine.

It ends when told to, when it has not heard from the coordinator for the length of its lease, and with its parent.
"""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence

import torch
import uvloop

from pearl.runtime.parent_death import watch_parent
from pearl.runtime.worker_process import exit_now, log_to_stderr, read_config
from pearl.types.config import Config
from pearl.workers.model import build_empty, resolve_device, use_one_thread
from pearl.workers.rollout.comparison import EngineComparison
from pearl.workers.rollout.kv_transfer.transport import KvTransport
from pearl.workers.rollout.process import CountTokens, parse, serve_engine, token_counter
from pearl.workers.rollout.protocol import Engine, Role
from pearl.workers.rollout.sglang.worker import serve_sglang
from pearl.workers.rollout.torch_engine.engine import TorchEngine
from pearl.workers.rollout.torch_engine.settings import settings_of
from pearl.workers.rollout.transports import make_transport
from pearl.workers.weight_transfer.receiver import Receiver

log = logging.getLogger(__name__)


def make_engine(
    config: Config,
    vocabulary_size: int,
    count_tokens: CountTokens | None,
    transport: KvTransport | None = None,
    role: Role = "colocated",
) -> Engine:
    """Raises ValueError when the settings ask for an engine that this process cannot be."""
    if config.rollout.engine != "torch":
        raise ValueError(
            f'rollout.engine = "{config.rollout.engine}" does not run in this worker; use "torch"'
        )
    if config.rollout.gpus_per_worker != 1:
        raise ValueError(
            f"rollout.gpus_per_worker = {config.rollout.gpus_per_worker}: the torch engine runs on one GPU; use 1"
        )
    device = resolve_device(config.model, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # No weights are read: the engine serves nothing before its first update.
    return TorchEngine(
        lambda: build_empty(config.model, vocabulary_size),
        settings_of(config, device, vocabulary_size),
        count_tokens,
        transport=transport,
        role=role,
    )


async def serve(options: argparse.Namespace, config: Config, count_tokens: CountTokens | None) -> str:
    """Returns why it ended; raises what made the engine fail to start."""
    if config.rollout.engine == "sglang":
        return await serve_sglang(options, config, count_tokens)
    transport = make_transport(config, options)
    engine = make_engine(config, options.vocabulary_size, count_tokens, transport, options.role)
    receiver = Receiver(options.slot, options.incarnation, socket.gethostname())
    kv_address = str(transport.address) if transport is not None else ""
    try:
        comparison = EngineComparison(config, options.vocabulary_size, engine)
        return await serve_engine(options, config, engine, receiver, kv_address, comparison)
    finally:
        if transport is not None:
            transport.close()


def main(arguments: Sequence[str]) -> None:
    watch_parent()
    options = parse("pearl.workers.rollout.worker", arguments)
    log_to_stderr()
    config = read_config(options)
    use_one_thread()
    with token_counter() as count_tokens:
        log.info("left: %s", uvloop.run(serve(options, config, count_tokens)))
        # The engine may be in a long pass and a link in a transfer: neither can be joined, both end with the process.
        exit_now()


if __name__ == "__main__":
    main(sys.argv[1:])
