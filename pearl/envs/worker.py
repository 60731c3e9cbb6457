"""``python -m pearl.envs.worker``: one environment worker, a plain process without torch.

It ends when told to, when it has not heard from the coordinator for the length of its lease, and with its parent.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from pearl.envs.loader import load_environment
from pearl.envs.protocol import Environment
from pearl.envs.service import EnvironmentService, Message
from pearl.runtime.parent_death import watch_parent
from pearl.runtime.rpc_client import RpcClient
from pearl.types.config import Config
from pearl.types.messages.control import Hello

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    watch_parent()
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = msgspec.json.decode(Path(options.config).read_bytes(), type=Config)
    try:
        environment = load_environment(config.environment.name, config.environment.options, config.model.path)
    except ValueError as error:
        sys.exit(f"pearl.envs.worker: {error}")
    log.info("left: %s", uvloop.run(serve(options, config, environment)))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Environment code that blocks a thread of its own can neither be cancelled nor joined: it ends with the process.
    os._exit(0)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pearl.envs.worker", description="An environment worker of PEARL."
    )
    parser.add_argument("--address", required=True, help="of the coordinator, e.g. tcp://10.0.0.1:7000")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config", required=True, help="the job's settings, as JSON")
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace, config: Config, environment: Environment) -> str:
    """Returns why it ended."""
    service = EnvironmentService(config, environment)
    hello = Hello(
        "environment", options.slot, options.incarnation, socket.gethostname(), os.getpid(), options.run_id
    )
    runtime = config.runtime
    peer = RpcClient(
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
    service.start()
    try:
        return await _until_told(peer)
    finally:
        await service.stop()


async def _until_told(peer: RpcClient) -> str:
    """SIGTERM ends it as the coordinator's word would: open episodes release what they hold."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(peer.run(), name="peer")
        waiting = group.create_task(told.wait(), name="SIGTERM")
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        waiting.cancel()
    return "SIGTERM" if running.cancelled() else running.result()


if __name__ == "__main__":
    main(sys.argv[1:])
