"""The emulated transfer of a snapshot: takes its time, then has the bytes that follow from the version."""

from collections.abc import Iterator
from typing import Literal, Self

import xxhash

from pearl.runtime.clock import Clock
from pearl.types.weights import BucketSpec, Snapshot
from pearl.workers.emulated_model import image_of
from pearl.workers.weight_transfer.errors import CorruptBucketError


class EmulatedReceived:
    def __init__(self, snapshot: Snapshot, seconds: float) -> None:
        self.snapshot = snapshot
        self.seconds = seconds
        self._image = memoryview(image_of(snapshot.version))

    def __iter__(self) -> Iterator[tuple[BucketSpec, memoryview]]:
        for bucket in self.snapshot.buckets:
            yield bucket, self._image[bucket.offset : bucket.offset + bucket.num_bytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no memory to release."""


class EmulatedReceiver:
    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock

    async def receive_async(
        self, snapshot: Snapshot, *, transport: Literal["auto", "mapped", "link"] = "auto", deadline_s: float
    ) -> EmulatedReceived:
        """``deadline_s`` is a bucket's, and an emulated bucket is never late."""
        await self._clock.sleep(self._seconds)
        received = EmulatedReceived(snapshot, self._seconds)
        for bucket, data in received:
            digest = xxhash.xxh3_128_hexdigest(data)
            if digest != bucket.digest:
                raise CorruptBucketError(snapshot, bucket, digest)
        return received
