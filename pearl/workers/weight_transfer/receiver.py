"""Slot side: gets a snapshot whole and proven, by mapping it or over a link, before anything may be loaded.

Links are kept for the versions to come, one a source. A failed one is dropped and the next source is tried; what
had arrived is thrown away. Blocking: call it in a thread, or use ``receive_async``.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, Self

import torch
import xxhash

from pearl.types import tcp_address
from pearl.types.error_text import error_text
from pearl.types.weights import BucketSpec, Snapshot, SnapshotSource, Version
from pearl.workers.weight_transfer.channel import (
    BucketReady,
    Channel,
    LinkKey,
    Open,
    Opened,
    PushResult,
    Request,
    Superseded,
)
from pearl.workers.weight_transfer.errors import (
    CorruptBucketError,
    LinkError,
    SourceGoneError,
    SupersededError,
    TransferError,
)
from pearl.workers.weight_transfer.link import RECEIVER, WINDOW, Link, Transfer, build_link
from pearl.workers.weight_transfer.mapped_image import MappedImage

Transport = Literal["auto", "mapped", "link"]


class Received:
    """A whole, verified snapshot in host memory: iterate over (bucket, bytes). Iterating does not block.

    The bytes are valid until ``close``, which lets the source or the next receive reuse the memory; engines load
    or copy them before.
    """

    def __init__(
        self, snapshot: Snapshot, transport: str, read: Callable[[BucketSpec], memoryview], seconds: float
    ) -> None:
        self.snapshot = snapshot
        self.transport = transport  # "mapped" or "link"
        self.seconds = seconds
        self._read = read
        self._image: MappedImage | None = None

    def __iter__(self) -> Iterator[tuple[BucketSpec, memoryview]]:
        for bucket in self.snapshot.buckets:
            yield bucket, self._read(bucket)

    def hold(self, image: MappedImage) -> Self:
        self._image = image
        return self

    def close(self) -> None:
        """Release the snapshot's memory. Repeated calls do nothing."""
        if self._image is not None:
            self._image.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SourceLink:
    """A link to one source with its control connection; dropped as a whole."""

    def __init__(self, key: LinkKey, address: str, deadline_s: float) -> None:
        self.key = key
        try:
            host, port = tcp_address.split(address)
            connection = socket.create_connection((host, port), timeout=deadline_s)
        except (OSError, ValueError) as error:
            raise SourceGoneError(f"source {key.source} at {address} cannot be reached: {error}") from error
        self.channel = Channel(connection)
        try:
            self.link = self._build(host, deadline_s)
        except LinkError:
            self.channel.close()
            raise

    def _build(self, host: str, deadline_s: float) -> Link:
        self.channel.send(Open(self.key))
        answer = self.channel.recv(deadline_s)
        if not isinstance(answer, Opened):
            raise LinkError(f"source {self.key.source} refused link {self.key}: {answer}")
        local = self.channel.local_address
        return build_link(answer.backend, RECEIVER, host, answer.store_port, answer.prefix, local, deadline_s)

    def drop(self) -> None:
        self.channel.close()
        self.link.abandon()


class Receiver:
    """Receives for one slot in one incarnation; one snapshot at a time."""

    def __init__(self, slot: int, incarnation: int, host: str | None = None) -> None:
        """``host`` as in SnapshotSource; None = whether a source is on this host is found out by mapping it."""
        self._slot = slot
        self._incarnation = incarnation
        self._host = host
        self._links: dict[int, SourceLink] = {}  # by source rank
        self._staging: torch.Tensor | None = None
        self._current: Received | None = None
        self._lock = threading.Lock()

    def receive(
        self,
        snapshot: Snapshot,
        *,
        transport: Transport = "auto",
        deadline_s: float,
        cancel: threading.Event | None = None,
    ) -> Received:
        """Block until the snapshot is here, whole and verified; closes what was received before.

        ``deadline_s`` bounds making a link and each bucket, at each source tried; ``cancel`` ends the wait at the
        next bucket. Raises a TransferError that says why otherwise.
        """
        if not self._lock.acquire(timeout=deadline_s):
            raise TransferError(f"slot {self._slot} is still receiving another snapshot after {deadline_s} s")
        try:
            self.release()
            self._drop_outdated(snapshot)
            attempt = FetchAttempt(snapshot, deadline_s, cancel or threading.Event())
            self._current = self._from_any_source(attempt, transport)
            return self._current
        finally:
            self._lock.release()

    async def receive_async(
        self, snapshot: Snapshot, *, transport: Transport = "auto", deadline_s: float
    ) -> Received:
        """``receive`` in a thread. When cancelled, the thread ends at its next bucket."""
        cancel = threading.Event()
        try:
            return await asyncio.to_thread(
                self.receive, snapshot, transport=transport, deadline_s=deadline_s, cancel=cancel
            )
        finally:
            cancel.set()

    def release(self) -> None:
        """Close what was received last."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def close(self) -> None:
        """Drop all links and the last snapshot. Harmless when repeated."""
        self.release()
        for rank in list(self._links):
            self._drop(rank)

    def links(self) -> dict[LinkKey, Link]:
        """Links that are up now."""
        return {link.key: link.link for link in self._links.values()}

    def _from_any_source(self, attempt: "FetchAttempt", transport: Transport) -> Received:
        failures: list[str] = []
        for take in self._routes(attempt, transport):
            try:
                return take()
            except (SourceGoneError, LinkError) as error:
                failures.append(error_text(error))
        reasons = "; ".join(failures) or f"no source offers transport {transport!r}"
        raise SourceGoneError(f"version {attempt.snapshot.version} cannot be had: {reasons}")

    def _routes(self, attempt: "FetchAttempt", transport: Transport) -> Iterator[Callable[[], Received]]:
        """Mapping first, since it costs no copy; links start at another source for each slot."""
        sources = attempt.snapshot.sources
        turn = self._slot % max(1, len(sources))
        sources = sources[turn:] + sources[:turn]
        for source in sources if transport != "link" else ():
            if transport == "mapped" or self._host in (None, source.host):
                yield partial(attempt.mapped, source)
        for source in sources if transport != "mapped" else ():
            if source.link_address:
                yield partial(self._over_link, attempt, source)

    def _over_link(self, attempt: "FetchAttempt", source: SnapshotSource) -> Received:
        link, first = self._asked_link(attempt, source)
        try:
            received = attempt.over_link(link, first, self._staging_for(attempt.snapshot.num_bytes))
        except SupersededError:
            raise  # at a bucket's edge: the link is good
        except TransferError:
            self._drop(source.rank)
            raise
        return received

    def _asked_link(
        self, attempt: "FetchAttempt", source: SnapshotSource
    ) -> tuple[SourceLink, BucketReady | Superseded]:
        """A link on which the version was asked for, with the first answer. A kept link may have died unnoticed
        since its last use: then a new one is made."""
        key = LinkKey(source.rank, source.incarnation, self._slot, self._incarnation)
        kept = self._links.get(source.rank)
        if kept is not None and kept.key == key:
            with contextlib.suppress(LinkError):
                return kept, attempt.ask(kept)
        self._drop(source.rank)
        link = self._links[source.rank] = SourceLink(key, source.link_address, attempt.deadline_s)
        try:
            return link, attempt.ask(link)
        except LinkError:
            self._drop(source.rank)
            raise

    def _drop_outdated(self, snapshot: Snapshot) -> None:
        """The training world restarted or changed: its old links lead nowhere."""
        current = {(source.rank, source.incarnation) for source in snapshot.sources}
        for rank, link in list(self._links.items()):
            if (rank, link.key.source_incarnation) not in current:
                self._drop(rank)

    def _drop(self, rank: int) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            link.drop()
            self._staging = None  # a late message of the dropped link may still be written there

    def _staging_for(self, num_bytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() != num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._staging


class FetchAttempt:
    """One snapshot being received."""

    def __init__(self, snapshot: Snapshot, deadline_s: float, cancel: threading.Event) -> None:
        self.snapshot = snapshot
        self.deadline_s = deadline_s
        self._cancel = cancel
        self._start = time.monotonic()

    def mapped(self, source: SnapshotSource) -> Received:
        image = MappedImage(self.snapshot, source)
        try:
            for bucket in self.snapshot.buckets:
                self.verify(bucket, image.bucket(bucket))
        except BaseException:
            image.close()
            raise
        return Received(self.snapshot, "mapped", image.bucket, self._seconds()).hold(image)

    def ask(self, link: SourceLink) -> BucketReady | Superseded:
        link.channel.send(Request(self.snapshot.version, self.deadline_s))
        return self._announcement(link)

    def over_link(self, link: SourceLink, first: BucketReady | Superseded, staging: torch.Tensor) -> Received:
        view = staging.numpy().data
        try:
            for bucket in self._arriving(link, first, staging):
                self.verify(bucket, view[bucket.offset : bucket.offset + bucket.num_bytes])
        except SupersededError:
            raise
        except TransferError as error:
            report_result(link, self.snapshot.version, error_text(error))
            raise
        report_result(link, self.snapshot.version, "")
        return Received(
            self.snapshot, "link", lambda b: view[b.offset : b.offset + b.num_bytes], self._seconds()
        )

    def _arriving(
        self, link: SourceLink, first: BucketReady | Superseded, staging: torch.Tensor
    ) -> Iterator[BucketSpec]:
        """Buckets as they come; the next one moves while the caller looks at this one."""
        under_way: deque[tuple[BucketSpec, Transfer]] = deque()
        announced: BucketReady | Superseded | None = first
        for index, bucket in enumerate(self.snapshot.buckets):
            frame = announced or self._announcement(link)
            announced = None
            if isinstance(frame, Superseded):
                for _, transfer in under_way:
                    transfer.wait(self.deadline_s)
                raise SupersededError(self.snapshot.version, frame.latest, f"before bucket {index}")
            if frame.index != index:
                raise LinkError(f"bucket {frame.index} was announced, not {index}")
            data = staging[bucket.offset : bucket.offset + bucket.num_bytes]
            under_way.append((bucket, link.link.receive(data)))
            if len(under_way) == WINDOW:
                yield self._next(under_way)
        while under_way:
            yield self._next(under_way)

    def _next(self, under_way: deque[tuple[BucketSpec, Transfer]]) -> BucketSpec:
        bucket, transfer = under_way.popleft()
        transfer.wait(self.deadline_s)
        return bucket

    def _announcement(self, link: SourceLink) -> BucketReady | Superseded:
        frame = link.channel.recv(self.deadline_s)
        if not isinstance(frame, BucketReady | Superseded):
            raise LinkError(f"not an announcement: {frame}")
        return frame

    def verify(self, bucket: BucketSpec, data: memoryview) -> None:
        if self._cancel.is_set():
            raise TransferError(f"receiving version {self.snapshot.version} was cancelled")
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest != bucket.digest:
            raise CorruptBucketError(self.snapshot, bucket, digest)

    def _seconds(self) -> float:
        return time.monotonic() - self._start


def report_result(link: SourceLink, version: Version, error: str) -> None:
    """Tell the source how it ended; when it cannot hear that any more, the bytes here are no worse for it."""
    with contextlib.suppress(LinkError):
        link.channel.send(PushResult(version, error))
