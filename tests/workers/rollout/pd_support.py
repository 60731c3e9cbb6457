"""Prefill and decode engines of one process that hand KV over through real sockets, and a coordinator's part."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from engine_support import MODEL, VOCABULARY, Answer, gather, image, request

from pearl.workers.model import build_empty
from pearl.workers.rollout.kv_transfer.limits import KvLimits
from pearl.workers.rollout.kv_transfer.transport import KvTransport
from pearl.workers.rollout.protocol import Delta, GenerateRequest, Role
from pearl.workers.rollout.torch_engine.core import EngineCore
from pearl.workers.rollout.torch_engine.engine import TorchEngine
from pearl.workers.rollout.torch_engine.settings import EngineSettings

LIMIT_S = 20.0
Tokens = npt.NDArray[np.int32]


@dataclass
class Worker:
    name: str
    engine: TorchEngine
    transport: KvTransport
    found: dict[int, Answer] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    """Attempts with their last delta."""
    told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def address(self) -> str:
        return str(self.transport.address)

    def emit(self, delta: Delta) -> None:
        assert delta.attempt not in self.over, f"attempt {delta.attempt} goes on after its end"
        gather(self.found, delta)
        if delta.is_last:
            self.over.add(delta.attempt)
        self.told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.told.clear()
                await self.told.wait()

    async def ended(self, *attempts: int) -> dict[int, Answer]:
        await self.until(lambda: self.over.issuperset(attempts))
        return self.found

    async def produced(self, count: int, attempt: int) -> None:
        await self.until(lambda: attempt in self.found and len(self.found[attempt].ids) >= count)

    async def take(self, number: int) -> None:
        version = image(number)
        await self.engine.begin_update(version.version, version.tensors)
        for bucket, data in version.buckets(1 << 20):
            await self.engine.update_bucket(bucket, data)
        await self.engine.end_update()

    async def core(self) -> EngineCore:
        """For a look at it while nothing runs."""
        core = self.engine._core
        assert core is not None
        await self.engine.checksum()  # between iterations
        return core

    async def is_clean(self) -> bool:
        """Nothing is queued, staged or in use: as if there had been no request."""
        async with asyncio.timeout(LIMIT_S):
            while self.transport.num_conversations:
                await self.engine.checksum()
        core = await self.core()
        assert not core.scheduler.running
        assert not core.scheduler.waiting
        assert self.transport.staged_bytes == 0
        await self.engine.flush_cache()
        pool = core.scheduler.pool
        return self.engine.is_idle() and pool.num_free == pool.num_pages


@asynccontextmanager
async def working(
    *roles: Role, limits: KvLimits | None = None, settings: Sequence[EngineSettings] = (), version: int = 1
) -> AsyncIterator[list[Worker]]:
    """Started engines with weights, one a role."""
    workers = []
    for index, role in enumerate(roles):
        name = f"rollout.{index}.1"
        transport = KvTransport("127.0.0.1", "127.0.0.1", name, limits)
        chosen = settings[index] if settings else EngineSettings()
        engine = TorchEngine(lambda: build_empty(MODEL, VOCABULARY), chosen, transport=transport, role=role)
        workers.append(Worker(name, engine, transport))
    try:
        for worker in workers:
            await worker.engine.start()
            await worker.take(version)
        yield workers
    finally:
        for worker in workers:
            await worker.engine.shutdown()


async def send(
    prefill: Worker,
    decode: Worker,
    attempt: int,
    context: Sequence[int] | Tokens,
    count: int,
    *,
    temperature: float = 0.0,
    stop_ids: tuple[int, ...] = (),
    seed: int | None = None,
) -> None:
    whole = request(attempt, context, count, temperature=temperature, stop_ids=stop_ids, seed=seed)
    await decode.engine.generate(msgspec.structs.replace(whole, pair=prefill.name), decode.emit)
    await prefill.engine.generate(msgspec.structs.replace(whole, pair=decode.address), prefill.emit)


def stage(whole: GenerateRequest, pair: str) -> GenerateRequest:
    return msgspec.structs.replace(whole, pair=pair)


async def abort(attempt: int, *workers: Worker) -> None:
    for worker in workers:
        await worker.engine.abort(attempt)
