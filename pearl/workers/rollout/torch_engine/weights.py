"""Takes a new version of the weights: staged as one image of bytes, copied into the model only when it is whole."""

import torch
from torch import nn

from pearl.types.weights import BucketSpec, TensorSpec
from pearl.workers.weight_transfer.checksum import canonical_tensors, dtype_name


class IncomingWeights:
    """One update. Tensors may span buckets; buckets may come in any order and more than once."""

    def __init__(self, model: nn.Module, tensors: tuple[TensorSpec, ...]) -> None:
        """Raises ValueError when the tensors are not exactly those of the model."""
        self._targets = dict(canonical_tensors(model))
        self._tensors = tensors
        for spec in tensors:
            check_spec(spec, self._targets.get(spec.name))
        missing = self._targets.keys() - {spec.name for spec in tensors}
        if missing:
            raise ValueError(f"the update lacks tensor {min(missing)!r} of the model")
        size = max((spec.offset + spec.num_bytes for spec in tensors), default=0)
        pinned = any(tensor.is_cuda for tensor in self._targets.values())
        self._image = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._covered: list[tuple[int, int]] = []

    def add(self, bucket: BucketSpec, data: memoryview) -> None:
        """Stage one bucket; ``data`` may be reused afterwards."""
        if data.nbytes != bucket.num_bytes:
            raise ValueError(f"bucket at {bucket.offset} has {data.nbytes} bytes, not {bucket.num_bytes}")
        if bucket.offset < 0:
            raise ValueError(f"bucket at {bucket.offset}: an image has no bytes before 0")
        # The last bucket may reach past the last tensor: images are padded.
        count = max(0, min(bucket.num_bytes, len(self._image) - bucket.offset))
        target = self._image.numpy().data
        target[bucket.offset : bucket.offset + count] = data.cast("B")[:count]
        self._covered.append((bucket.offset, bucket.offset + count))

    @torch.no_grad()
    def load(self) -> None:
        """Copy everything into the model. Raises ValueError, before anything is touched, when bytes are missing."""
        covered = merged_ranges(self._covered)
        for spec in self._tensors:
            start, end = spec.offset, spec.offset + spec.num_bytes
            if start < end and not any(a <= start and end <= b for a, b in covered):
                raise ValueError(f"the update ended without all bytes of tensor {spec.name!r}")
        for spec in self._tensors:
            target = self._targets[spec.name]
            staged = self._image[spec.offset : spec.offset + spec.num_bytes]
            # A clone where the layout is not aligned for the dtype: a view would be refused.
            if spec.offset % target.element_size():
                staged = staged.clone()
            target.copy_(staged.view(target.dtype).view(target.shape))


def check_spec(spec: TensorSpec, target: torch.Tensor | None) -> None:
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


def merged_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as ranges in order that do not touch."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
