"""How a rollout worker gets a snapshot, whatever way the bytes travel. ``pearl.workers.weight_transfer.receiver`` maps
them or takes them over a link; an emulated worker has no bytes to fetch. Imports nothing heavy.
"""

from collections.abc import Iterator
from typing import Literal, Protocol, Self

from pearl.types.weights import BucketSpec, Snapshot


class Received(Protocol):
    """A whole, verified snapshot in host memory: (bucket, bytes) in order; the bytes are valid inside ``with``."""

    @property
    def snapshot(self) -> Snapshot: ...

    @property
    def seconds(self) -> float:
        """Seconds that the snapshot took to arrive."""
        ...

    def __iter__(self) -> Iterator[tuple[BucketSpec, memoryview]]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Receiver(Protocol):
    async def receive_async(
        self, snapshot: Snapshot, *, transport: Literal["auto", "mapped", "link"] = "auto", deadline_s: float
    ) -> Received:
        """Raises a TransferError that says why it did not arrive whole."""
        ...
