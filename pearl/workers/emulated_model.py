"""The weights of emulated workers: a few KiB that follow from the version, so that nothing has to travel.

Trainer and engines make, check and prove them as they would a real model's. Imports no torch.
"""

import numpy as np
import xxhash

from pearl.runtime.counter_rng import bits, counter_bits
from pearl.types.weights import BucketSpec, Snapshot, SnapshotSource, TensorSpec, Version

_SHAPE = (32, 32)
_TENSOR_BYTES = 4 * _SHAPE[0] * _SHAPE[1]
_NAMES = ("attention", "embedding", "head", "mlp")  # sorted, as all layouts are
TENSORS = tuple(
    TensorSpec(name, "float32", _SHAPE, index * _TENSOR_BYTES, _TENSOR_BYTES)
    for index, name in enumerate(_NAMES)
)
NUM_BYTES = len(TENSORS) * _TENSOR_BYTES


def image_of(version: Version) -> bytes:
    """All tensors' bytes, as ``TENSORS`` lays them out."""
    key = np.uint64(bits(version.lineage, version.step))
    words = counter_bits(key, np.arange(NUM_BYTES // 4))
    # From 1 to 2: any bits would do, but these are finite numbers.
    return ((words >> np.uint64(41)).astype("<u4") | np.uint32(0x3F800000)).tobytes()


def checksum_of(image: bytes | bytearray) -> str:
    """Return the checksum over name, dtype, shape and bytes of every tensor."""
    hasher = xxhash.xxh3_128()
    for spec in TENSORS:
        hasher.update(repr((spec.name, spec.dtype, spec.shape)).encode())
        hasher.update(memoryview(image)[spec.offset : spec.offset + spec.num_bytes])
    return hasher.hexdigest()


def snapshot_of(version: Version, source: SnapshotSource) -> Snapshot:
    image = image_of(version)
    bucket = BucketSpec(0, NUM_BYTES, xxhash.xxh3_128_hexdigest(image))
    return Snapshot(version, NUM_BYTES, TENSORS, (bucket,), (source,), checksum_of(image))
