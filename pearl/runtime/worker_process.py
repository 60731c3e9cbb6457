"""What the processes that answer to a coordinator have in common: arguments, log, connection, end."""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from pearl.runtime.rpc_client import RpcClient
from pearl.types.config import Config
from pearl.types.messages.control import Heartbeat, Hello, Installation, PeerKind

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class ConnectionSettings(Protocol):
    """What of ``RuntimeConfig`` a connection needs, wherever it comes from."""

    @property
    def heartbeat_period_s(self) -> float: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def queue_messages(self) -> int: ...
    @property
    def max_frame_bytes(self) -> int: ...


class Service(Protocol):
    """What a process does for the coordinator; ``RpcClient`` says what of it is called when."""

    async def handle(self, message: Any, /) -> msgspec.Struct | None: ...
    def heartbeat(self) -> Heartbeat: ...


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of what every such process is started with; a process adds its own."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--address", required=True, help="of the coordinator, e.g. tcp://10.0.0.1:7000")
    parser.add_argument("--run-id", required=True)
    return parser


def make_worker_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of what every worker is started with."""
    parser = make_parser(module, description)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config", required=True, help="the job's settings, as JSON")
    return parser


def read_config(options: argparse.Namespace) -> Config:
    """Read the job's settings from where ``--config`` says."""
    return msgspec.json.decode(Path(options.config).read_bytes(), type=Config)


def make_hello(
    kind: PeerKind,
    options: argparse.Namespace,
    *,
    slot: int = 0,
    kv_address: str = "",
    installation: Installation | None = None,
) -> Hello:
    """Return how a worker introduces itself."""
    return Hello(
        kind,
        slot,
        options.incarnation,
        socket.gethostname(),
        os.getpid(),
        options.run_id,
        kv_address,
        installation,
    )


def make_client(
    address: str, settings: ConnectionSettings, hello: Hello, messages: Any, service: Service
) -> RpcClient:
    """Return the connection over which ``service`` answers ``messages``, a union of struct types; nothing runs yet."""
    return RpcClient(
        address,
        hello=hello,
        messages=messages,
        handler=service.handle,
        heartbeat=service.heartbeat,
        heartbeat_period_s=settings.heartbeat_period_s,
        lease_s=settings.lease_s,
        queue_messages=settings.queue_messages,
        max_frame_bytes=settings.max_frame_bytes,
    )


def exit_now() -> NoReturn:
    """Flush, then end with exit code 0 without joining threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
