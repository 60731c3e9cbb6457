"""Weight versions and what is known of a published snapshot. Metadata only: tensors never come here."""

from typing import Literal

import msgspec


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A weight version. A restore from a checkpoint opens a new lineage, so that an old step 8 is
    never taken for a new one; within a lineage ``step`` grows by one an update."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}:{self.step}"


class SupersededVersionError(ValueError):
    """What was asked for cannot be had any more: its source has a newer version already. Crosses the wire by name."""


class SourceLostError(ValueError):
    """No process that has it could be reached: perhaps its training world is dying. Crosses the wire by name."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in the snapshot's byte image."""

    name: str
    dtype: str  # torch name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the image
    num_bytes: int


class BucketSpec(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous piece of the image, the unit of sending, of deadlines and of verification."""

    offset: int
    num_bytes: int
    digest: str  # xxh3-128, hex, over the bytes


class SnapshotSource(msgspec.Struct, frozen=True, array_like=True):
    """A process that holds the whole image in host memory and can serve it."""

    rank: int  # training rank
    incarnation: int  # of the training world
    host: str
    path: str  # maps the image for processes on `host`, e.g. /proc/PID/fd/N
    link_address: str  # host:port of the rendezvous store for links; "" where links are off


class Snapshot(msgspec.Struct, frozen=True):
    """A published version: what it holds, where it can be had, and how to prove it."""

    version: Version
    num_bytes: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[BucketSpec, ...]
    sources: tuple[SnapshotSource, ...]
    checksum: str  # over name, dtype, shape and bytes of every tensor in name order


UpdateMode = Literal["interrupt", "in_place", "drain"]
"""How a worker takes new weights: abort and resume, keep running, or finish what it has first."""
