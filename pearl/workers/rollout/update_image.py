"""An update's bytes while they come: what an engine stages, as one image, until nothing of a version is missing."""

from collections.abc import Iterable, Mapping, Sequence
from mmap import mmap

import numpy as np
import torch

from pearl.types.weights import BucketSpec, TensorSpec
from pearl.workers.weight_transfer.checksum import dtype_name


def check_tensors(tensors: Sequence[TensorSpec], targets: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError when the update's tensors are not exactly those of the model, ``targets``."""
    for spec in tensors:
        _check_spec(spec, targets.get(spec.name))
    missing = targets.keys() - {spec.name for spec in tensors}
    if missing:
        raise ValueError(f"the update lacks tensor {min(missing)!r} of the model")


def place_bucket(image: mmap | memoryview, bucket: BucketSpec, data: memoryview) -> tuple[int, int]:
    """Copy a bucket to its place; returns the range of bytes that it covers. ValueError when it is not what it says.

    Other threads go on meanwhile: a slice assignment would hold the GIL, and with it heartbeats, for the whole copy.
    """
    if data.nbytes != bucket.num_bytes:
        raise ValueError(f"bucket at {bucket.offset} has {data.nbytes} bytes, not {bucket.num_bytes}")
    if bucket.offset < 0:
        raise ValueError(f"bucket at {bucket.offset}: an image has no bytes before 0")
    # The last bucket may reach past the last tensor: images are padded.
    count = max(0, min(bucket.num_bytes, len(image) - bucket.offset))
    if count:
        target = np.frombuffer(image, dtype=np.uint8, count=count, offset=bucket.offset)
        np.copyto(target, np.frombuffer(data, dtype=np.uint8, count=count))
    return bucket.offset, bucket.offset + count


def check_covered(tensors: Iterable[TensorSpec], ranges: Iterable[tuple[int, int]]) -> None:
    """Raises ValueError when ``ranges`` leave out a byte of a tensor."""
    covered = _merged(ranges)
    for spec in tensors:
        start, end = spec.offset, spec.offset + spec.num_bytes
        if start < end and not any(a <= start and end <= b for a, b in covered):
            raise ValueError(f"the update ended without all bytes of tensor {spec.name!r}")


def _check_spec(spec: TensorSpec, target: torch.Tensor | None) -> None:
    """Raises ValueError when ``spec`` does not describe the model's tensor of its name, None when it has none."""
    if target is None:
        raise ValueError(f"the update has tensor {spec.name!r}, which the model lacks")
    wanted = (dtype_name(target.dtype), tuple(target.shape), target.nbytes)
    given = (spec.dtype, tuple(spec.shape), spec.num_bytes)
    if given != wanted:
        raise ValueError(
            f"tensor {spec.name!r} comes as {spec.dtype} {list(spec.shape)} in {spec.num_bytes} bytes, "
            f"the model has {wanted[0]} {list(wanted[1])} in {wanted[2]} bytes"
        )
    if spec.offset < 0:
        raise ValueError(f"tensor {spec.name!r} has offset {spec.offset}: an image has no bytes before 0")


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same bytes as ranges in order that do not touch."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
