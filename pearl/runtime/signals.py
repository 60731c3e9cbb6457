"""Signals by which a node agent is told to leave, the same for one of any kind."""

import asyncio
import logging
import signal
from collections.abc import Callable

LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what Slurm sends as notice of a preemption; SIGHUP says that the terminal or ssh connection is gone."""

log = logging.getLogger(__name__)


def watch_signals(leave: Callable[[str], None]) -> None:
    """Have ``leave`` called with the signal's name, from the event loop that runs; SIGUSR2 does nothing. A SIGHUP that
    is ignored stays so: under nohup the end of the terminal is not meant."""
    loop = asyncio.get_running_loop()
    for number in LEAVE_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, leave, number.name)
    loop.add_signal_handler(signal.SIGUSR2, log.info, "SIGUSR2: nothing to do")
