"""Whether a rollout worker hands KV over or takes it, and where others reach it for that."""

import argparse

from pearl.types import tcp_address
from pearl.types.config import Config
from pearl.workers.rollout.kv_transfer.transport import KvTransport
from pearl.workers.weight_transfer.address import advertised_address


def make_transport(config: Config, options: argparse.Namespace) -> KvTransport | None:
    """Listening already; None when nothing in this job is ever disaggregated."""
    if config.elastic.pd == "colocated":
        return None
    name = f"rollout.{options.slot}.{options.incarnation}"
    coordinator = tcp_address.parse(options.address)
    if coordinator.is_loopback:  # it has all its workers on its own host
        return KvTransport("127.0.0.1", "127.0.0.1", name)
    is_ipv6 = coordinator.is_ipv6
    return KvTransport(
        "::" if is_ipv6 else "0.0.0.0",
        advertised_address(None, peers_elsewhere=True, ipv6=is_ipv6),
        name,
    )
