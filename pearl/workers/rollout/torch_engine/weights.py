"""Takes a new version of the weights: staged as one image of bytes, copied into the model only when it is whole."""

import torch
from torch import nn

from pearl.types.weights import BucketSpec, TensorSpec
from pearl.workers.rollout.update_image import check_covered, check_tensors, place_bucket
from pearl.workers.weight_transfer.checksum import canonical_tensors


class IncomingWeights:
    """One update. Tensors may span buckets; buckets may come in any order and more than once."""

    def __init__(self, model: nn.Module, tensors: tuple[TensorSpec, ...]) -> None:
        """Raises ValueError when the tensors are not exactly those of the model."""
        self._targets = dict(canonical_tensors(model))
        self._tensors = tensors
        check_tensors(tensors, self._targets)
        size = max((spec.offset + spec.num_bytes for spec in tensors), default=0)
        pinned = any(tensor.is_cuda for tensor in self._targets.values())
        self._image = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._covered: list[tuple[int, int]] = []

    def add(self, bucket: BucketSpec, data: memoryview) -> None:
        """Stage one bucket; ``data`` may be reused afterwards."""
        self._covered.append(place_bucket(self._image.numpy().data, bucket, data))

    @torch.no_grad()
    def load(self) -> None:
        """Copy everything into the model. Raises ValueError, before anything is touched, when bytes are missing."""
        check_covered(self._tensors, self._covered)
        for spec in self._tensors:
            target = self._targets[spec.name]
            staged = self._image[spec.offset : spec.offset + spec.num_bytes]
            # A clone where the layout is not aligned for the dtype: a view would be refused.
            if spec.offset % target.element_size():
                staged = staged.clone()
            target.copy_(staged.view(target.dtype).view(target.shape))
