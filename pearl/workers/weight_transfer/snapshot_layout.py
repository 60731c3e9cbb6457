"""Where tensors and buckets lie in the byte image of a snapshot."""

from collections.abc import Iterable

import torch

from pearl.types.weights import TensorSpec

ALIGNMENT = 64
"""Bytes. A multiple of every element size, so that no bucket's edge cuts an element; also a cache line."""


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorSpec, ...]:
    """Give each (name, dtype, shape) its aligned place, in the order given."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, dtype, shape in tensors:
        num_bytes = element_size(dtype)
        for size in shape:
            num_bytes *= size
        specs.append(TensorSpec(name, dtype, shape, offset, num_bytes))
        offset = aligned(offset + num_bytes)
    return tuple(specs)


def image_bytes(specs: tuple[TensorSpec, ...]) -> int:
    return aligned(specs[-1].offset + specs[-1].num_bytes) if specs else 0


def bucket_edges(num_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """(offset, num_bytes) of the buckets that cover the image, all but the last of the same size."""
    return [(start, min(bucket_bytes, num_bytes - start)) for start in range(0, num_bytes, bucket_bytes)]


def checked_bucket_bytes(bucket_bytes: int) -> int:
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise ValueError(f"weights.bucket_bytes = {bucket_bytes}: use a positive multiple of {ALIGNMENT}")
    return bucket_bytes


def element_size(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no torch dtype; use a name such as 'float32'")
    return found.itemsize


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
