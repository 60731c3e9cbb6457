"""The snapshot image: a version's bytes in host memory that other processes of the host can map.

The memory is an anonymous file (memfd), reached as ``/proc/PID/fd/N``: it vanishes with the process, however
that ends, once no reader maps it any more. A published image is never written again while anyone reads it:
readers hold a shared lock on the file, which the kernel drops when they die; an image whose lock is taken is
left to its readers and another one takes its place. Two images are kept: the latest version and the next one.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator

import torch
import xxhash

from pearl.types.weights import BucketSpec, Snapshot, SnapshotSource, TensorSpec, Version
from pearl.workers.weight_transfer.checksum import WeightsHasher, byte_tensor, dtype_name
from pearl.workers.weight_transfer.snapshot_layout import (
    aligned,
    bucket_edges,
    checked_bucket_bytes,
    image_bytes,
    lay_out,
)

log = logging.getLogger(__name__)

TRAILER = struct.Struct("<8sqqqqq")
"""Magic, whole (0 or 1), incarnation, lineage, step, image bytes: says what the image before it holds."""
MAGIC = b"pearlimg"
PIECE_BYTES = 256 << 10
"""Copied and hashed at a time, so that the hash reads what the copy left in the core's own cache."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A mapped file that shrinks kills its readers with SIGBUS."""


def trailer_offset(num_bytes: int) -> int:
    return aligned(num_bytes)


def file_bytes(num_bytes: int) -> int:
    return trailer_offset(num_bytes) + TRAILER.size


class Image:
    """One memfd, mapped: the image's bytes, then the trailer."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.pins = 0  # readers inside this process, guarded by the store's lock
        self.version: Version | None = None  # what it holds whole
        self.fd = os.memfd_create("pearl-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, file_bytes(num_bytes))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._map = mmap.mmap(self.fd, file_bytes(num_bytes))
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)  # keeps the mapping alive
        self.view = memoryview(self._map)

    def try_lock(self) -> bool:
        """Keep readers out; False when one is in."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def mark(self, version: Version, incarnation: int, whole: bool) -> None:
        trailer = TRAILER.pack(MAGIC, whole, incarnation, version.lineage, version.step, self.num_bytes)
        self.view[trailer_offset(self.num_bytes) :] = trailer
        self.version = version if whole else None

    def close(self) -> None:
        """Close the file: no new reader finds it. The memory goes when the last mapping does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SnapshotWriter:
    """Fills an image tensor by tensor, hashing once while each piece is in cache. Made by ``SnapshotStore``."""

    def __init__(self, image: Image, specs: tuple[TensorSpec, ...], bucket_bytes: int) -> None:
        self._image = image
        self._specs = specs
        self._edges = bucket_edges(image.num_bytes, bucket_bytes)
        self._buckets: list[BucketSpec] = []
        self._hasher = WeightsHasher()
        self._next = 0

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor of the layout. Raises ValueError when it is not that one."""
        spec = self._specs[self._next] if self._next < len(self._specs) else None
        given = (name, dtype_name(tensor.dtype), tuple(tensor.shape))
        if spec is None or given != (spec.name, spec.dtype, spec.shape):
            raise ValueError(f"the snapshot expects {spec} next, not {given}")
        self._next += 1
        self._hasher.begin(*given)
        source = byte_tensor(tensor)
        for start in range(0, spec.num_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, spec.num_bytes)
            self._image.bytes[spec.offset + start : spec.offset + end].copy_(source[start:end])
            self._hasher.update(self._image.view[spec.offset + start : spec.offset + end])
            self._hash_buckets(spec.offset + end)

    def finish(self) -> tuple[tuple[BucketSpec, ...], str]:
        """(buckets, checksum). Raises ValueError when tensors are missing."""
        if self._next < len(self._specs):
            raise ValueError(f"the snapshot still lacks {self._specs[self._next].name!r}")
        self._hash_buckets(self._image.num_bytes)
        return tuple(self._buckets), self._hasher.hexdigest()

    def _hash_buckets(self, written: int) -> None:
        while len(self._buckets) < len(self._edges):
            offset, num_bytes = self._edges[len(self._buckets)]
            if offset + num_bytes > written:
                return
            digest = xxhash.xxh3_128_hexdigest(self._image.view[offset : offset + num_bytes])
            self._buckets.append(BucketSpec(offset, num_bytes, digest))


class SnapshotStore:
    """The versions one training rank holds for others. Thread-safe: one publisher, any number of readers."""

    def __init__(self, incarnation: int, rank: int, host: str, bucket_bytes: int) -> None:
        self.incarnation = incarnation
        self.rank = rank
        self.link_address = ""  # set by the link server, before the first publish
        self.latest: Snapshot | None = None
        self._host = host
        self._bucket_bytes = checked_bucket_bytes(bucket_bytes)
        self._lock = threading.Lock()
        self._images: list[Image] = []  # at most two; the latest version's is last

    def publish(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """Copy the tensors, whatever device they are on, into an image and make it the latest version.

        Until it returns, the version before is served; it stays so when this raises. Names are unique.
        """
        entries = sorted(tensors, key=lambda entry: entry[0])
        specs = lay_out((name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in entries)
        with self.writing(version, specs) as writer:
            for name, tensor in entries:
                writer.write(name, tensor)
        assert self.latest is not None
        return self.latest

    @contextlib.contextmanager
    def writing(self, version: Version, specs: tuple[TensorSpec, ...]) -> Iterator[SnapshotWriter]:
        """Publish tensors that come one by one in the layout's (sorted) order, e.g. from a gather."""
        if image_bytes(specs) == 0:
            raise ValueError(f"version {version} has no bytes: give the model's tensors")
        image = self._next_image(image_bytes(specs))
        image.mark(version, self.incarnation, whole=False)
        try:
            writer = SnapshotWriter(image, specs, self._bucket_bytes)
            yield writer
            buckets, checksum = writer.finish()
            self._make_latest(image, version, specs, buckets, checksum)
        finally:
            image.unlock()

    def _make_latest(
        self,
        image: Image,
        version: Version,
        specs: tuple[TensorSpec, ...],
        buckets: tuple[BucketSpec, ...],
        checksum: str,
    ) -> None:
        path = f"/proc/{os.getpid()}/fd/{image.fd}"
        source = SnapshotSource(self.rank, self.incarnation, self._host, path, self.link_address)
        with self._lock:
            image.mark(version, self.incarnation, whole=True)
            self._images.remove(image)
            self._images.append(image)
            self.latest = Snapshot(version, image.num_bytes, specs, buckets, (source,), checksum)

    def _next_image(self, num_bytes: int) -> Image:
        """A locked image to write: the older one when nobody reads it, otherwise a new one in its place."""
        with self._lock:
            if len(self._images) == 2:
                image = self._images[0]
                if image.num_bytes == num_bytes and not image.pins and image.try_lock():
                    image.version = None
                    return image
                log.info("image of version %s is still read: left to its readers", image.version)
                image.close()
                del self._images[0]
            image = Image(num_bytes)
            assert image.try_lock()
            self._images.insert(0, image)
            return image

    @contextlib.contextmanager
    def pinned(self, version: Version) -> Iterator[torch.Tensor | None]:
        """The bytes of a version, which stay as they are inside the block; None when it is no longer held."""
        with self._lock:
            image = next((image for image in self._images if image.version == version), None)
            if image is not None:
                image.pins += 1
        try:
            yield None if image is None else image.bytes[: image.num_bytes]
        finally:
            if image is not None:
                with self._lock:
                    image.pins -= 1

    def close(self) -> None:
        """Offer nothing any more; readers keep what they have. Harmless when repeated."""
        with self._lock:
            for image in self._images:
                image.close()
            self._images.clear()
