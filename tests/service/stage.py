"""A run of the service with a core that does as the test says: commands are ordered, events are waited for."""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from pearl.core.elastic.preemption import choose_gpus
from pearl.runtime.journal import Journal
from pearl.runtime.rpc_server import RpcServer
from pearl.service.console import Console
from pearl.service.recovery import InitialState
from pearl.service.run_files import RunFiles
from pearl.service.run_loop import RunLoop
from pearl.testing.cluster import Cluster
from pearl.testing.fakes import RUN_ID
from pearl.types import commands, events
from pearl.types.config import Config
from pearl.types.gpu_table import GpuTable, GpuZone
from pearl.types.ids import GpuId, Incarnation, OpId, Slot
from pearl.types.trace import TraceEvent

LIMIT_S = 15.0  # for anything a test waits for; only a failing test gets there
Event = TypeVar("Event", bound=events.Event)


class ObedientCore:
    """Stands in for the core: keeps what happened, gives the commands that were ordered."""

    def __init__(self) -> None:
        self.events: list[events.AnyEvent] = []
        self.orders: list[commands.AnyCommand] = []
        self.table = GpuTable()
        self.step = 0
        self.pools: dict[str, str] = {}
        self.finished = False
        self.on_event: Callable[[events.AnyEvent], None] = lambda event: None
        self.changed = asyncio.Event()

    def add_gpu(self, gpu: str, *, present: bool = False, zone: GpuZone = "preemptible") -> None:
        self.table.add(GpuId(gpu), zone, present=present)

    def handle(self, event: events.AnyEvent, now: float) -> list[commands.AnyCommand]:
        if not isinstance(event, events.Tick):
            self.events.append(event)
        self.on_event(event)
        if isinstance(event, events.PreemptRequested):
            self.orders.append(self._answer(event))
        self.changed.set()
        orders, self.orders = self.orders, []
        return orders

    def _answer(self, event: events.PreemptRequested) -> commands.AnswerPreempt:
        """As the core answers; the GPUs come and go at once."""
        try:
            gpus = choose_gpus(event, self.table, inter=True)
        except ValueError as error:
            return commands.AnswerPreempt(event.request, (), str(error))
        for gpu in gpus:
            self.table.rows[gpu].present = event.action == "arrive"
        return commands.AnswerPreempt(event.request, gpus)

    def next_wakeup(self) -> float | None:
        return None

    def status(self) -> dict[str, Any]:
        return {"step": self.step}

    def host_pools(self) -> dict[str, str]:
        return self.pools

    def profile(self) -> None:
        """Nothing was measured."""

    def snapshot(self) -> bytes:
        return b""


class Stage:
    def __init__(self, config: Config, run_dir: Path, trace: tuple[TraceEvent, ...]) -> None:
        self.core = ObedientCore()
        self.cluster = Cluster(config)
        self.stream = io.StringIO()
        self.files = RunFiles(run_dir)
        self.files.write_config(config)
        self.journal = Journal.create(self.files.journal, b"", segment_bytes=1 << 30)
        beginning = InitialState(self.core, self.journal, 0.0, True)  # type: ignore[arg-type]
        console = Console(self.stream, config.rollout.num_workers)
        self.run_loop = RunLoop(
            config,
            RUN_ID,
            self.files,
            console,
            beginning,
            self.cluster,  # type: ignore[arg-type]
            trace,
        )
        self.server: RpcServer | None = None
        self._ops = 100
        self._seen = 0

    def order(self, *orders: commands.AnyCommand) -> None:
        self.core.orders.extend(orders)
        self.run_loop._inbox.put_urgent(events.Tick())

    def op(self) -> OpId:
        self._ops += 1
        return OpId(self._ops)

    async def event(self, kind: type[Event]) -> Event:
        """The next of that kind; those before it are passed over."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                while self._seen < len(self.core.events):
                    event = self.core.events[self._seen]
                    self._seen += 1
                    if isinstance(event, kind):
                        return event
                self.core.changed.clear()
                await self.core.changed.wait()

    async def start_worker(self, slot: int, gpu: str, incarnation: int = 1) -> events.WorkerReady:
        self.order(
            commands.StartWorker(self.op(), Slot(slot), Incarnation(incarnation), "colocated", (GpuId(gpu),))
        )
        return await self.event(events.WorkerReady)

    async def start_trainer(self) -> events.TrainerReady:
        self.order(commands.StartTrainer(self.op(), Incarnation(1), 0, None))
        return await self.event(events.TrainerReady)

    async def update(self, slot: int, ready: events.TrainerReady) -> None:
        self.order(commands.UpdateWeights(self.op(), Slot(slot), Incarnation(1), ready.version, "interrupt"))
        await self.event(events.WeightsVerified)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.core.events]


@asynccontextmanager
async def staged(
    config: Config,
    run_dir: Path,
    *,
    trace: tuple[TraceEvent, ...] = (),
    before: Callable[[Stage], Awaitable[None]] | None = None,
) -> AsyncIterator[Stage]:
    """The run from its Started event to the end of the block; ``before`` happens while it starts."""
    stage = Stage(config, run_dir, trace)
    try:
        async with (
            asyncio.timeout(3 * LIMIT_S),
            stage.run_loop.make_server() as server,
            asyncio.TaskGroup() as group,
        ):
            stage.server = server
            cluster = group.create_task(stage.cluster.run())
            running = group.create_task(stage.run_loop.run(server))
            if before is not None:
                await before(stage)
            await stage.event(events.Started)
            try:
                yield stage
            finally:
                stage.order(commands.Finish({}, "", 0))
            await running
            cluster.cancel()
    finally:
        stage.journal.close()
        stage.files.close()
