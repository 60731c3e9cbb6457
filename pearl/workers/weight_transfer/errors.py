"""Why weights did not arrive. All are expected: the old version stays in place and the next push may succeed."""

from pearl.types.weights import BucketSpec, Snapshot, Version


class TransferError(Exception):
    """Base: this snapshot did not arrive whole; nothing of it may be loaded."""


class SupersededError(TransferError):
    """The source holds another version by now; ``latest`` when it is known."""

    def __init__(self, wanted: Version, latest: Version | None, where: str) -> None:
        super().__init__(f"version {wanted} was superseded by {latest or 'another one'} {where}")
        self.wanted = wanted
        self.latest = latest


class CorruptBucketError(TransferError):
    """The bytes received are not those that were published."""

    def __init__(self, snapshot: Snapshot, bucket: BucketSpec, actual: str) -> None:
        index = snapshot.buckets.index(bucket)
        names = ", ".join(tensors_in(snapshot, bucket)[:4])
        super().__init__(
            f"bucket {index} of {len(snapshot.buckets)} of version {snapshot.version} is corrupt: "
            f"digest {actual}, published {bucket.digest}; it holds {names}"
        )
        self.index = index


class SourceGoneError(TransferError):
    """The source process is gone, or cannot be reached from here."""


class LinkError(TransferError):
    """The link failed or ran past its limit; it is not used again."""


def tensors_in(snapshot: Snapshot, bucket: BucketSpec) -> list[str]:
    """Names of the tensors with bytes in the bucket."""
    end = bucket.offset + bucket.num_bytes
    return [
        tensor.name
        for tensor in snapshot.tensors
        if tensor.offset < end and tensor.offset + tensor.num_bytes > bucket.offset
    ]
