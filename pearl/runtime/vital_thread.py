"""A thread without which its process is of no use: an error that comes out of it ends the process.

Python reports such an error and goes on, so a worker would send heartbeats while nobody does its work.
"""

import logging
import os
import threading

log = logging.getLogger(__name__)

EXIT_CODE = 70
"""An internal software error, as in sysexits.h."""


class VitalThread(threading.Thread):
    """Run ``target`` as a daemon thread; whatever it raises, SystemExit included, ends the whole process."""

    def run(self) -> None:
        try:
            super().run()
        except BaseException:  # noqa: BLE001 - also SystemExit, which threading drops without a word
            try:
                log.critical("thread %s died, and with it the process", self.name, exc_info=True)
                logging.shutdown()
            finally:
                os._exit(EXIT_CODE)
