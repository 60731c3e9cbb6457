"""The coordinator's own log: a file of the run directory, for as long as the run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send everything that PEARL logs to ``path``, and nothing to the terminal."""
    logging.raiseExceptions = False  # a full disk is told once, not with every line
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger("pearl")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        handler.close()
