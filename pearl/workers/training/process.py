"""What the process that speaks for a training world is started with, and how it is connected."""

import argparse
from collections.abc import Sequence

from pearl.runtime.installation import installation
from pearl.runtime.rpc_client import RpcClient
from pearl.runtime.worker_process import make_client, make_hello, make_worker_parser
from pearl.types.config import Config
from pearl.workers.training.service import Message, TrainingService


def make_peer(options: argparse.Namespace, config: Config, service: TrainingService) -> RpcClient:
    hello = make_hello("training", options, installation=installation(config))
    return make_client(options.address, config.runtime, hello, Message, service)


def parse(module: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_worker_parser(module, "A rank of PEARL's training world.")
    parser.add_argument("--run-dir", required=True, help="checkpoints go to its subdirectory")
    parser.add_argument("--vocabulary-size", type=int, required=True)
    return parser.parse_args(arguments)
