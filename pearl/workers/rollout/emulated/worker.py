"""``python -m pearl.workers.rollout.emulated.worker``: one emulated rollout worker, a plain process without torch."""

import argparse
import logging
import sys
from collections.abc import Sequence

import uvloop

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.parent_death import watch_parent
from pearl.runtime.worker_process import exit_now, log_to_stderr, read_config
from pearl.types.config import Config
from pearl.workers.rollout.emulated.engine import LOAD_SHARE, EmulatedEngine
from pearl.workers.rollout.emulated.receiver import EmulatedReceiver
from pearl.workers.rollout.emulated.settings import settings_of
from pearl.workers.rollout.process import CountTokens, parse, serve_engine, token_counter
from pearl.workers.rollout.transports import make_transport

log = logging.getLogger(__name__)

MODULE = "pearl.workers.rollout.emulated.worker"


async def serve(options: argparse.Namespace, config: Config, count_tokens: CountTokens | None) -> str:
    """Returns why it ended."""
    clock = MonotonicClock()
    settings = settings_of(config, options.slot, options.vocabulary_size)
    transport = make_transport(config, options)
    engine = EmulatedEngine(settings, clock, count_tokens, transport, options.role)
    receiver = EmulatedReceiver((1.0 - LOAD_SHARE) * config.emulated.update_seconds, clock)
    kv_address = "" if transport is None else str(transport.address)
    try:
        return await serve_engine(options, config, engine, receiver, kv_address)
    finally:
        log.info("%s", engine.account())


def main(arguments: Sequence[str]) -> None:
    watch_parent()
    options = parse(MODULE, arguments)
    log_to_stderr()
    config = read_config(options)
    with token_counter() as count_tokens:
        log.info("left: %s", uvloop.run(serve(options, config, count_tokens)))
        # Timers of an iteration may be pending; nothing of them is worth waiting for.
        exit_now()


if __name__ == "__main__":
    main(sys.argv[1:])
