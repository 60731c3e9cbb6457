"""Whole runs of the service with the real core against a cluster in this process."""

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checker import check
from cluster import Cluster
from fakes import RUN_ID, small_config

from pearl.coordinator import replay, resuming
from pearl.coordinator.console import Console
from pearl.coordinator.run_files import RunFiles
from pearl.coordinator.session import Session
from pearl.runtime.hub import Hub
from pearl.state.commands import Finish
from pearl.state.config import Config
from pearl.state.trace import TraceEvent


class Life:
    """One life of a run in ``run_dir``."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        *,
        resume: bool = False,
        segment_bytes: int = resuming.SEGMENT_BYTES,
        trace: Sequence[TraceEvent] = (),
    ) -> None:
        self.cluster = cluster
        self.stream = io.StringIO()
        self.files = RunFiles(run_dir)
        if not resume:
            self.files.write_config(config)
        begin = resuming.go_on if resume else resuming.begin
        self.beginning = begin(config, self.files, segment_bytes)
        console = Console(self.stream, config.rollout.num_workers)
        self.session = Session(
            config,
            RUN_ID,
            self.files,
            console,
            self.beginning,
            cluster,  # type: ignore[arg-type]
            trace,
        )
        self.hub: Hub | None = None

    async def run(self) -> Finish:
        try:
            async with asyncio.timeout(20), self.session.make_hub() as hub, asyncio.TaskGroup() as group:
                self.hub = hub
                cluster = group.create_task(self.cluster.run())
                try:
                    return await self.session.run(hub)
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
) -> Life:
    config = config or small_config()
    cluster = Cluster(config)
    if prepare is not None:
        prepare(cluster)
    life = Life(config, run_dir, cluster, trace=trace)
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
