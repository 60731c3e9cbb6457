"""A stand-in for a worker's process: runs an SGLang engine of its own, says so, and waits to be killed."""

import asyncio
import sys
from pathlib import Path

import sglang_support
from engine_support import MODEL, VOCABULARY

from pearl.runtime.parent_death import watch_parent
from pearl.workers.rollout.sglang.engine import SglangEngine
from pearl.workers.rollout.sglang.model_files import write_model
from pearl.workers.rollout.sglang.server import Server


async def main(directory: Path) -> None:
    settings = sglang_support.settings_in(directory)
    server = Server(settings)
    async with asyncio.TaskGroup() as group:
        engine = SglangEngine(
            settings,
            server,
            lambda: write_model(MODEL, VOCABULARY, settings.model_directory),
            group,
            start_limit_s=sglang_support.START_LIMIT_S,
        )
        await engine.start()
        print(server.pid, flush=True)  # noqa: T201  what the test waits for
        await asyncio.sleep(sglang_support.START_LIMIT_S)


watch_parent()
asyncio.run(main(Path(sys.argv[1])))
