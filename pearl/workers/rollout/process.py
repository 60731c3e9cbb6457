"""What every rollout worker's process has in common, whatever its engine: arguments, counter, and its life.

It ends when told to, when it has not heard from the coordinator for the length of its lease, and with its parent.
"""

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import get_args

from pearl.runtime.installation import installation
from pearl.runtime.mmap_counter import ENVIRONMENT_KEY, MmapCounter
from pearl.runtime.worker_process import make_client, make_hello, make_worker_parser
from pearl.types.config import Config
from pearl.workers.final_errors import final_errors
from pearl.workers.rollout.protocol import Engine, Role
from pearl.workers.rollout.service import EngineComparison, Message, RolloutService
from pearl.workers.rollout.snapshot_protocol import Receiver

CountTokens = Callable[[int], None]


async def serve_engine(
    options: argparse.Namespace,
    config: Config,
    engine: Engine,
    receiver: Receiver,
    kv_address: str = "",
    comparison: EngineComparison | None = None,
) -> str:
    """Returns why it ended; raises what made the engine fail to start. ``kv_address`` is where it takes KV, open
    already. The coordinator hears of the worker when its engine has started: what it is told then it can do."""
    name = f"rollout.{options.slot}.{options.incarnation}"
    service = RolloutService(config, name, engine, receiver, comparison)
    hello = make_hello(
        "rollout", options, slot=options.slot, kv_address=kv_address, installation=installation(config)
    )
    peer = make_client(options.address, config.runtime, hello, Message, service)
    service.connect(peer)
    with (
        final_errors() if engine.name == "torch" else nullcontext()
    ):  # what a server of its own says may pass
        await service.start()
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(service.send_frames(peer), name="frames")
        reason = await peer.run()
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
    with MmapCounter(Path(path)) as counter:
        yield counter.add


def parse(module: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_worker_parser(module, "A rollout worker of PEARL.")
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--role", choices=get_args(Role), default="colocated", help="that it starts in")
    return parser.parse_args(arguments)
