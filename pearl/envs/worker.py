"""``python -m pearl.envs.worker``: one environment worker, a plain process without torch.

It ends when told to, when it has not heard from the coordinator for the length of its lease, and with its parent.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from pearl.envs.loader import load_environment
from pearl.envs.own_reward import Reward, load_reward
from pearl.envs.protocol import Environment
from pearl.envs.service import EnvironmentService, Message
from pearl.runtime.parent_death import watch_parent
from pearl.runtime.rpc_client import RpcClient
from pearl.runtime.worker_process import (
    exit_now,
    log_to_stderr,
    make_client,
    make_hello,
    make_worker_parser,
    read_config,
)
from pearl.types.config import Config

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    watch_parent()
    options = parse(arguments)
    log_to_stderr()
    config = read_config(options)
    try:
        environment = load_environment(config.environment.name, config.environment.options, config.model.path)
        reward = load_reward(config.environment.reward)
    except ValueError as error:
        sys.exit(f"pearl.envs.worker: {error}")
    log.info("left: %s", uvloop.run(serve(options, config, environment, reward)))
    # Environment code that blocks a thread of its own can neither be cancelled nor joined: it ends with the process.
    exit_now()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_worker_parser("pearl.envs.worker", "An environment worker of PEARL.")
    parser.add_argument("--slot", type=int, required=True)
    return parser.parse_args(arguments)


async def serve(
    options: argparse.Namespace, config: Config, environment: Environment, reward: Reward | None
) -> str:
    """Returns why it ended."""
    service = EnvironmentService(config, environment, reward=reward)
    hello = make_hello("environment", options, slot=options.slot)
    peer = make_client(options.address, config.runtime, hello, Message, service)
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
