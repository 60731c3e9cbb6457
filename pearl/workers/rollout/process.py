"""What every rollout worker's process has in common, whatever its engine: arguments, counter, and its life.

It ends when told to, when it has not heard from the coordinator for the length of its lease, and with its parent.
"""

import argparse
import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import get_args

from pearl.runtime.installation import installation
from pearl.runtime.mmap_counter import ENVIRONMENT_KEY, MmapCounter
from pearl.runtime.rpc_client import RpcClient
from pearl.types.config import Config
from pearl.types.messages.control import Hello
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
    hello = Hello(
        "rollout",
        options.slot,
        options.incarnation,
        socket.gethostname(),
        os.getpid(),
        options.run_id,
        kv_address,
        installation(config),
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
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="A rollout worker of PEARL.")
    parser.add_argument("--address", required=True, help="of the coordinator, e.g. tcp://10.0.0.1:7000")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config", required=True, help="the job's settings, as JSON")
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--role", choices=get_args(Role), default="colocated", help="that it starts in")
    return parser.parse_args(arguments)
