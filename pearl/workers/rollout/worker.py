"""``python -m pearl.workers.rollout.worker`` under torchrun: one rollout worker; rank 0 owns control and the engine.

It ends when told to, when it has not heard from the coordinator for the length of its lease, and with its parent.
"""

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import uvloop

from pearl.runtime.counter import ENVIRONMENT_KEY, Counter
from pearl.runtime.lifeline import watch_parent
from pearl.runtime.peer import Peer
from pearl.state.config import Config
from pearl.state.messages.control import Hello
from pearl.workers.links.receiver import Receiver
from pearl.workers.model import build_model, resolve_device, use_one_thread
from pearl.workers.rollout.protocol import Engine
from pearl.workers.rollout.service import Message, RolloutService
from pearl.workers.rollout.torch_engine.engine import TorchEngine
from pearl.workers.rollout.torch_engine.settings import settings_of

log = logging.getLogger(__name__)

CountTokens = Callable[[int], None]


def make_engine(config: Config, vocabulary_size: int, count_tokens: CountTokens | None) -> Engine:
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
    # Random weights that nobody sees: the engine serves nothing before its first update.
    return TorchEngine(
        lambda: build_model(config.model, vocabulary_size, None), settings_of(config, device), count_tokens
    )


async def serve(options: argparse.Namespace, config: Config, count_tokens: CountTokens | None) -> str:
    """Returns why it ended; raises what made the engine fail to start."""
    engine = make_engine(config, options.vocabulary_size, count_tokens)
    host = socket.gethostname()
    receiver = Receiver(options.slot, options.incarnation, host)
    service = RolloutService(config, f"rollout.{options.slot}.{options.incarnation}", engine, receiver)
    hello = Hello("rollout", options.slot, options.incarnation, host, os.getpid(), options.run_id)
    runtime = config.runtime
    peer = Peer(
        options.address,
        hello=hello,
        messages=Message,
        handler=service.handle,
        heartbeat=service.heartbeat,
        heartbeat_period_s=runtime.heartbeat_period_s,
        lease_s=runtime.lease_s,
        queue_messages=runtime.queue_messages,
        max_frame_bytes=runtime.max_frame_bytes,
    )
    service.connect(peer)
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(service.start(), name="start")
        sending = group.create_task(service.send_frames(peer), name="frames")
        reason = await peer.run()
        starting.cancel()
        sending.cancel()
    return reason


@contextmanager
def token_counter() -> Iterator[CountTokens | None]:
    """Counts sampled tokens in the file that the environment names, so that they are known after a kill -9."""
    path = os.environ.get(ENVIRONMENT_KEY)
    if path is None:
        yield None
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Counter(Path(path)) as counter:
        yield counter.add


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pearl.workers.rollout.worker", description="A rollout worker of PEARL."
    )
    parser.add_argument("--address", required=True, help="of the coordinator, e.g. tcp://10.0.0.1:7000")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config", required=True, help="the job's settings, as JSON")
    parser.add_argument("--vocabulary-size", type=int, required=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    watch_parent()
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = msgspec.json.decode(Path(options.config).read_bytes(), type=Config)
    use_one_thread()
    with token_counter() as count_tokens:
        log.info("left: %s", uvloop.run(serve(options, config, count_tokens)))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # The engine may be in a long pass and a link in a transfer: neither can be joined, both end with the process.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
