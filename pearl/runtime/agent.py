"""The node agent's process: ``python -m pearl.runtime.agent`` on the coordinator's own host, which starts it, ``join``
on a host that joins a run. Imports no torch, so that it is up at once and small.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import psutil
import uvloop

from pearl.runtime import gpus, parent_death
from pearl.runtime.installation import installation
from pearl.runtime.node_agent import NodeAgent
from pearl.runtime.preemptible_agent import JoinOptions, PreemptibleAgent
from pearl.runtime.signals import watch_signals
from pearl.runtime.subreaper import adopt_orphans
from pearl.runtime.worker_process import log_to_stderr, make_client, make_parser
from pearl.types.config import RuntimeConfig
from pearl.types.messages.control import AgentReport, ControlMessage, Hello, HostPool

VIRTUAL_GPU_BYTES = 1 << 30

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    log_to_stderr()
    if parent_death.PARENT_VARIABLE in os.environ:
        # SIGTERM, so that it can still end what was re-parented away from its groups.
        parent_death.watch_parent(signal.SIGTERM)
    try:
        report = make_report(options.host, options.virtual_gpus, options.virtual_gpu_bytes)
    except ValueError as error:
        sys.exit(f"pearl.runtime.agent: {error}")
    reason = uvloop.run(serve(options, report))
    log.info("left: %s", reason)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    defaults = RuntimeConfig()
    parser = make_parser("pearl.runtime.agent", "A PEARL node agent.")
    parser.add_argument("--slot", type=int, default=0, help="number of this agent in the run")
    parser.add_argument(
        "--incarnation", type=int, default=1, help="one more than that of the last agent in the slot"
    )
    parser.add_argument("--host", default=socket.gethostname(), help="name of this host in GPU ids")
    parser.add_argument(
        "--virtual-gpus", type=int, help="offer this many virtual GPUs instead of the host's own"
    )
    parser.add_argument("--virtual-gpu-bytes", type=int, default=VIRTUAL_GPU_BYTES)
    parser.add_argument("--heartbeat-period-s", type=float, default=defaults.heartbeat_period_s)
    parser.add_argument("--lease-s", type=float, default=defaults.lease_s)
    parser.add_argument("--queue-messages", type=int, default=defaults.queue_messages)
    parser.add_argument("--max-frame-bytes", type=int, default=defaults.max_frame_bytes)
    parser.add_argument("--prepare", action="store_true", help="import what torch workers need at once")
    return parser.parse_args(arguments)


def join(terms: JoinOptions, report: AgentReport) -> str:
    """Serve as a host that may be taken away; returns why it left. GivenUpError: it was not let in, or not again."""
    log_to_stderr()

    async def run() -> str:
        return await PreemptibleAgent(terms, report, adopts_orphans=adopt_orphans()).run()

    return uvloop.run(run())


def make_report(
    host: str, num_virtual_gpus: int | None, virtual_gpu_bytes: int, *, pool: HostPool = "local"
) -> AgentReport:
    """Return what this host offers: its GPUs, or virtual ones. ValueError when CUDA_VISIBLE_DEVICES makes no sense
    here."""
    if num_virtual_gpus is not None:
        offered = gpus.virtual_gpus(host, num_virtual_gpus, virtual_gpu_bytes)
    else:
        offered = gpus.physical_gpus(host, os.environ.get(gpus.VISIBLE_VARIABLE))
    return AgentReport(host, offered, psutil.virtual_memory().total, pool)


async def serve(options: argparse.Namespace, report: AgentReport) -> str:
    agent = NodeAgent(report, options.lease_s, adopts_orphans=adopt_orphans(), prepares=options.prepare)
    watch_signals(agent.leave)
    hello = Hello(
        "agent",
        options.slot,
        options.incarnation,
        options.host,
        os.getpid(),
        options.run_id,
        installation=installation(),
    )
    return await agent.run(make_client(options.address, options, hello, ControlMessage, agent))


if __name__ == "__main__":
    main(sys.argv[1:])
