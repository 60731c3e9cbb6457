"""``pearl agent``: this host's GPUs join a run and leave it again.

Exit codes: 0 left as asked (a signal, the end of the run) or no run was there, 1 not let in, 2 usage error.
"""

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from pearl.cli.numbers import MAX_GPUS_PER_NODE, number, whole
from pearl.config import ConfigError
from pearl.runtime import coordinator_file
from pearl.runtime.agent import VIRTUAL_GPU_BYTES, join, make_report
from pearl.runtime.preemptible_agent import GivenUpError, JoinOptions, NoRunError
from pearl.service.processes.process_manager import LOCAL_HOST
from pearl.types import tcp_address
from pearl.types.config import RuntimeConfig
from pearl.types.exit_codes import EXIT_FAILURE
from pearl.types.messages.control import AgentReport

MAX_LIFETIME_S = 365 * 86_400.0
SECONDS = number(0, MAX_LIFETIME_S, "seconds")
DESCRIPTION = """\
Have this host's GPUs join a run: as preemptible ones, or as reserved ones that the job awaits (--pool rollout) and
whose loss is a failure. It needs the model at the same path as the coordinator's host has it (the built-in one needs
nothing); all other settings come from the coordinator.

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP mean that the host is taken away: the run is notified, what it computes
here is interrupted and continues elsewhere, and the agent leaves when the GPUs are given back or the grace is over. A
second signal makes it leave at once. When the coordinator is lost, everything here ends and it tries to join again."""


def agent(words: Sequence[str]) -> int:
    """Serve until it leaves.

    Raises:
        ConfigError: on a usage error.
    """
    options = _parse(words)
    join_options, report = _join_options(options), _report(options)
    try:
        reason = join(join_options, report)
    except NoRunError as error:
        reason = str(error)
    except GivenUpError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    print(f"left: {reason}")
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pearl agent", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = RuntimeConfig()
    add = parser.add_argument
    add(
        "--coordinator",
        required=True,
        metavar="ADDRESS",
        help="HOST:PORT, which pearl run says when it starts, or the run directory, whose file is read at each try",
    )
    add(
        "--pool",
        choices=("spot", "rollout", "training"),
        default="spot",
        help="spot: comes and goes; rollout: one of rollout.reserved_gpus' hosts (default: spot)",
    )
    add("--run-id", default="", metavar="ID", help="join this run only (default: whichever is there)")
    add("--host", metavar="NAME", help="of this host in GPU ids (default: its host name)")
    add(
        "--virtual-gpus",
        type=whole(1, MAX_GPUS_PER_NODE),
        metavar="N",
        help="offer this many virtual GPUs instead of the host's own",
    )
    add("--grace", type=SECONDS, default=30.0, metavar="S", help="between notice and end (default: 30)")
    add("--lifetime", type=SECONDS, metavar="S", help="the host is taken away S seconds from now")
    add(
        "--rejoin",
        type=SECONDS,
        default=60.0,
        metavar="S",
        help="how long to wait for a run, then exit with code 0 (default: 60)",
    )
    add(
        "--log-dir",
        type=Path,
        metavar="D",
        help="for the logs of what runs here (default: the run's own)",
    )
    add(
        "--lease",
        type=number(0.02, 86_400, "seconds"),
        default=defaults.lease_s,
        metavar="S",
        help=f"a coordinator silent for so long is lost (default: {defaults.lease_s:g})",
    )
    add(
        "--heartbeat",
        type=number(0.01, 3600, "seconds"),
        default=defaults.heartbeat_period_s,
        metavar="S",
        help=f"how often to say that this host is there (default: {defaults.heartbeat_period_s:g})",
    )
    return parser.parse_args(words)


def _join_options(options: argparse.Namespace) -> JoinOptions:
    defaults = RuntimeConfig()
    if options.log_dir is not None and options.log_dir.exists() and not options.log_dir.is_dir():
        raise ConfigError(f"--log-dir {options.log_dir}: is a file")
    if options.lease < 2 * options.heartbeat:
        raise ConfigError(
            f"--lease {options.lease:g}: is less than two heartbeats (--heartbeat {options.heartbeat:g}): the "
            "connection would be given up while it is good"
        )
    return JoinOptions(
        address="" if (file := _file(options.coordinator)) else _address(options.coordinator),
        file=file,
        run_id=options.run_id,
        grace_s=options.grace,
        rejoin_s=options.rejoin,
        lifetime_s=options.lifetime,
        log_directory=None if options.log_dir is None else options.log_dir.resolve(),
        lease_s=options.lease,
        heartbeat_period_s=options.heartbeat,
        queue_messages=defaults.queue_messages,
        max_frame_bytes=defaults.max_frame_bytes,
    )


def _report(options: argparse.Namespace) -> AgentReport:
    host = options.host if options.host is not None else socket.gethostname()
    if not host or "/" in host or host == LOCAL_HOST:
        raise ConfigError(f'--host "{host}": cannot be the name of a host that joins; choose another one')
    if options.pool == "training":
        raise ConfigError(
            "--pool training: a training world over several hosts is not built yet; it runs on the coordinator's host. "
            "Use --pool rollout or spot"
        )
    report = make_report(host, options.virtual_gpus, VIRTUAL_GPU_BYTES, pool=options.pool)
    if not report.gpus:
        raise ConfigError(
            "this host has no GPU to offer; --virtual-gpus N offers virtual ones that run on the CPU"
        )
    return report


def _file(text: str) -> Path | None:
    """Return the file that names the coordinator, None when ``text`` is an address."""
    path = Path(text)
    if "://" in text or not ("/" in text or path.exists()):
        return None
    is_file = path.is_file() or path.name == coordinator_file.NAME
    return (path if is_file else path / coordinator_file.NAME).absolute()


def _address(text: str) -> str:
    """Return the coordinator's address with its scheme."""
    try:
        address = tcp_address.parse(text if "://" in text else f"tcp://{text}")
    except ValueError:
        address = None
    if address is None or not address.port:
        raise ConfigError(
            f'--coordinator "{text}": is not HOST:PORT (an IPv6 address in brackets); pearl run says it when it starts'
        )
    return str(address)
