"""``python -m pearl.workers.training.emulated.worker``: the emulated training world, a plain process without torch."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.parent_death import watch_parent
from pearl.runtime.worker_process import exit_now, log_to_stderr, read_config
from pearl.types.config import Config
from pearl.workers.training.emulated.checkpoints import EmulatedCheckpoints
from pearl.workers.training.emulated.world import EmulatedWorld
from pearl.workers.training.process import make_peer, parse
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.service import TrainingService

log = logging.getLogger(__name__)

MODULE = "pearl.workers.training.emulated.worker"


async def serve(options: argparse.Namespace, config: Config) -> str:
    """Returns why it ended."""
    checkpoints = EmulatedCheckpoints(Path(options.run_dir) / "checkpoints", config.training.keep_checkpoints)
    progress = Progress()
    world = EmulatedWorld(
        config, options.incarnation, options.vocabulary_size, checkpoints, progress, MonotonicClock()
    )
    service = TrainingService(config, checkpoints, progress, world.execute)
    return await make_peer(options, config, service).run()


def main(arguments: Sequence[str]) -> None:
    watch_parent()
    options = parse(MODULE, arguments)
    log_to_stderr()
    config = read_config(options)
    log.info("left: %s", uvloop.run(serve(options, config)))
    exit_now()  # a checkpoint being looked at in a thread is not worth waiting for


if __name__ == "__main__":
    main(sys.argv[1:])
