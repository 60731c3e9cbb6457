"""Weights into the engine: fetched, loaded into a quiet engine, proven by the engine's own checksum."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from pearl.types.weights import Snapshot
from pearl.workers.rollout.protocol import Engine
from pearl.workers.rollout.snapshot_protocol import Received, Receiver


@dataclass(frozen=True, slots=True)
class Loaded:
    checksum: str
    transfer_s: float
    load_s: float


class WeightLoader:
    def __init__(
        self, engine: Engine, receiver: Receiver, transport: Literal["auto", "mapped", "link"]
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._transport: Literal["auto", "mapped", "link"] = transport

    async def take(
        self,
        snapshot: Snapshot,
        deadline_s: float,
        quiet: Callable[[], Awaitable[None]],
        keep: Callable[[Received], None] | None = None,
    ) -> Loaded:
        """The engine may go on while the snapshot arrives; ``quiet`` stops it for the loading only. ``keep`` is given
        the bytes too, in a thread.

        Raises:
            TransferError: the snapshot did not arrive; the engine still has what it had.
            ValueError: the engine has no usable weights any more, and says why.
        """
        with await self._receiver.receive_async(
            snapshot, transport=self._transport, deadline_s=deadline_s
        ) as received:
            await quiet()
            loop = asyncio.get_running_loop()
            began = loop.time()
            checksum = await self._load(received)
            loaded = Loaded(checksum, received.seconds, loop.time() - began)
            if keep is not None:
                await asyncio.to_thread(keep, received)
        if checksum != snapshot.checksum:
            raise ValueError(
                f"checksum {checksum} after loading, published {snapshot.checksum}; serving stopped"
            )
        return loaded

    async def _load(self, received: Received) -> str:
        snapshot = received.snapshot
        await self._engine.begin_update(snapshot.version, snapshot.tensors)
        for bucket, data in received:
            await self._engine.update_bucket(bucket, data)
        return await self._engine.end_update()
