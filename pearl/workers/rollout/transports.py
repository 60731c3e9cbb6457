"""Whether a rollout worker hands KV over or takes it, and where others reach it for that."""

import argparse

from pearl.types.config import Config
from pearl.workers.rollout.kv_transfer.transport import KvTransport
from pearl.workers.weight_transfer.address import advertised_address

LOOPBACK = "tcp://127."
"""A coordinator there has all its workers on its own host."""


def make_transport(config: Config, options: argparse.Namespace) -> KvTransport | None:
    """Listening already; None when nothing in this job is ever disaggregated."""
    if config.elastic.pd == "colocated":
        return None
    name = f"rollout.{options.slot}.{options.incarnation}"
    if options.address.startswith(LOOPBACK):
        return KvTransport("127.0.0.1", "127.0.0.1", name)
    return KvTransport("0.0.0.0", advertised_address(None, peers_elsewhere=True), name)
