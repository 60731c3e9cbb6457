"""Whole runs of the service with the real core against a cluster in this process."""

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checker import check

from pearl.runtime.rpc_server import RpcServer
from pearl.service import recovery, replay
from pearl.service.console import Console
from pearl.service.run_files import RunFiles
from pearl.service.run_loop import RunLoop
from pearl.testing.cluster import Cluster
from pearl.testing.fakes import RUN_ID, small_config
from pearl.types.commands import Finish
from pearl.types.config import Config
from pearl.types.trace import TraceEvent


class WholeRun:
    """One life of a run in ``run_dir``."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        *,
        resume: bool = False,
        segment_bytes: int = recovery.SEGMENT_BYTES,
        trace: Sequence[TraceEvent] = (),
    ) -> None:
        self.cluster = cluster
        self.stream = io.StringIO()
        self.files = RunFiles(run_dir)
        if not resume:
            self.files.write_config(config)
        begin = recovery.recover if resume else recovery.fresh
        self.beginning = begin(config, self.files, segment_bytes)
        console = Console(self.stream, config.rollout.num_workers)
        self.run_loop = RunLoop(
            config,
            RUN_ID,
            self.files,
            console,
            self.beginning,
            cluster,  # type: ignore[arg-type]
            trace,
        )
        self.server: RpcServer | None = None

    async def run(self) -> Finish:
        try:
            async with (
                asyncio.timeout(20),
                self.run_loop.make_server() as server,
                asyncio.TaskGroup() as group,
            ):
                self.server = server
                cluster = group.create_task(self.cluster.run())
                try:
                    return await self.run_loop.run(server)
                finally:
                    cluster.cancel()
        finally:
            self.beginning.journal.close()
            self.files.close()


async def run_whole(
    run_dir: Path,
    config: Config | None = None,
    prepare: Callable[[Cluster], None] | None = None,
    trace: Sequence[TraceEvent] = (),
) -> WholeRun:
    config = config or small_config()
    cluster = Cluster(config)
    if prepare is not None:
        prepare(cluster)
    life = WholeRun(config, run_dir, cluster, trace=trace)
    finish = await life.run()
    assert finish.exit_code == 0, finish
    assert check(run_dir) == []
    assert replay.check(run_dir) is None
    return life


def once(act: Callable[[], None], at: int = 5) -> Callable[[Any], None]:
    """Act at the call number ``at``."""
    left = at

    def count(_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            act()

    return count
