"""A thread that its process cannot do without: its error ends the process, with the reason in the log."""

import subprocess
import sys

import pytest

from pearl.runtime.vital_thread import EXIT_CODE

PROGRAM = """
import logging, sys, threading
from pearl.runtime.vital_thread import VitalThread
logging.basicConfig(stream=sys.stderr)
def work():
    {work}
VitalThread(target=work, name="engine").start()
threading.Event().wait(30)
"""


@pytest.mark.parametrize("work", ["raise ValueError('out of luck')", "raise SystemExit(0)"])
def test_its_error_ends_the_process_and_is_named(work: str) -> None:
    program = PROGRAM.format(work=work)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20, check=False)
    assert ended.returncode == EXIT_CODE
    assert b"thread engine died" in ended.stderr
    assert work.split()[1].partition("(")[0].encode() in ended.stderr
