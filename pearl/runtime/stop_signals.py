"""Signals that stop a command, which then exits with 128 + their number.

Imports next to nothing: a signal that comes before there is a handler finds Python's answer, a traceback.
"""

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_on_stop_signals() -> None:
    """Have a stop signal end this process at once with its exit code, any number of them and at any point: for the time
    in which there is nothing to put in order."""
    for number in STOP_SIGNALS:
        signal.signal(number, _exit)


def hold_stop_signals() -> None:
    """Have them wait until ``release_stop_signals``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release_stop_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def restore_stop_signals() -> None:
    """Have them mean again what they mean to Python: KeyboardInterrupt, and the end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
