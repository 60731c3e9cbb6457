"""What the process that speaks for a training world is started with, and how it is connected."""

import argparse
import os
import socket
from collections.abc import Sequence

from pearl.runtime.installation import installation
from pearl.runtime.rpc_client import RpcClient
from pearl.types.config import Config
from pearl.types.messages.control import Hello
from pearl.workers.training.service import Message, TrainingService


def make_peer(options: argparse.Namespace, config: Config, service: TrainingService) -> RpcClient:
    runtime = config.runtime
    hello = Hello(
        "training",
        0,
        options.incarnation,
        socket.gethostname(),
        os.getpid(),
        options.run_id,
        installation=installation(config),
    )
    return RpcClient(
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


def parse(module: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description="A rank of PEARL's training world."
    )
    parser.add_argument("--address", required=True, help="of the coordinator, e.g. tcp://10.0.0.1:7000")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config", required=True, help="the job's settings, as JSON")
    parser.add_argument("--run-dir", required=True, help="checkpoints go to its subdirectory")
    parser.add_argument("--vocabulary-size", type=int, required=True)
    return parser.parse_args(arguments)
