"""Takes a new version of the weights for SGLang: staged as one image in memory, which its ranks then map.

The image is a file without a name, so that nothing of it is left when this process ends however rudely. SGLang sees
it only when it is whole, and reads it with its own loaders; no bytes of it go through a socket.
"""

import base64
import json
import math
import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from pearl.types.weights import BucketSpec, TensorSpec, Version
from pearl.workers.rollout.sglang.model_files import Model
from pearl.workers.rollout.sglang.pieces import Piece
from pearl.workers.rollout.update_image import check_covered, check_tensors, place_bucket
from pearl.workers.weight_transfer.checksum import canonical_tensors, weights_checksum

MAX_NAMES = 5
"""In one complaint."""


class StagingMemory:
    """The file without a name that updates are staged in, kept while they have the same size: fresh pages cost more
    than the copy into them."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("pearl-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self.image = mmap.mmap(self.fd, num_bytes)

    def close(self) -> None:
        self.image.close()
        os.close(self.fd)


class StagedWeights:
    """One update. Tensors may span buckets; buckets may come in any order and more than once."""

    def __init__(
        self,
        model: Model,
        version: Version,
        tensors: tuple[TensorSpec, ...],
        memory: StagingMemory | None = None,
    ) -> None:
        """Take over ``memory``, that of an update which nobody needs any more, where it fits; else close it. Raises
        ValueError, and leaves the memory alone, when the tensors are not exactly those of the model."""
        self.version = version
        self._model = model
        self._tensors = tensors
        self._specs = {spec.name: spec for spec in tensors}
        check_tensors(tensors, dict(canonical_tensors(model.shapes)))
        self._size = max((spec.offset + spec.num_bytes for spec in tensors), default=1)
        if memory is not None and memory.num_bytes != self._size:
            memory.close()
            memory = None
        self.memory = memory or StagingMemory(self._size)
        self._image = self.memory.image
        self._covered: list[tuple[int, int]] = []

    def add(self, bucket: BucketSpec, data: memoryview) -> None:
        """Stage one bucket; ``data`` may be reused afterwards."""
        self._covered.append(place_bucket(self._image, bucket, data))

    def check_whole(self) -> None:
        """Raises ValueError when bytes are missing."""
        check_covered(self._tensors, self._covered)

    def checksum(self) -> str:
        """Return the checksum of the image, as ``Snapshot.checksum``."""
        view = memoryview(self._image)
        try:
            return weights_checksum(
                (s.name, s.dtype, s.shape, view[s.offset : s.offset + s.num_bytes]) for s in self._tensors
            )
        finally:
            view.release()

    def order(self, answer: Path, num_ranks: int) -> list[str]:
        """Return a payload for each of SGLang's ranks, as its endpoint takes it. They answer in files beside
        ``answer``, one a rank."""
        content = {
            "image": f"/proc/{os.getpid()}/fd/{self.memory.fd}",
            "num_bytes": self._size,
            "answer": str(answer),
            "pieces": [self._place(piece) for piece in self._model.pieces],
        }
        # SGLang unpickles named tensors from its own loopback endpoint; ours has no content, its name says all.
        payload = base64.b64encode(pickle.dumps([(json.dumps(content), torch.zeros(1))])).decode()
        return [payload] * num_ranks

    def _place(self, piece: Piece) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
        """Return where SGLang's ranks find the tensor in the image."""
        spec = self._specs[piece.tensor]
        first_byte = spec.offset + piece.offset * (spec.num_bytes // max(1, math.prod(spec.shape)))
        return piece.name, spec.dtype, first_byte, piece.shape, piece.strides

    def close(self) -> None:
        self.memory.close()


def answers(answer: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Read the ranks' answers; each can be read once. ValueError when one has not answered."""
    found = []
    for rank in range(num_ranks):
        path = answer.with_name(f"{answer.name}.{rank}")
        try:
            found.append(json.loads(path.read_bytes()))
        except OSError as error:
            raise ValueError(f"rank {rank} of SGLang did not say what it loaded: {error}") from error
        path.unlink()
    return found


def complaints(found: list[dict[str, Any]]) -> str:
    """Return what is wrong with what was loaded, on any rank; "" means that every parameter of every rank holds
    its part of the image, and every tensor of the image is held by some rank."""
    for rank, said in enumerate(found):
        if said.get("error"):
            return f"rank {rank} of SGLang could not load it: {said['error']}"
        if said["wrong"]:
            return f"rank {rank} of SGLang serves other values than it was given in {_some(said['wrong'])}"
        if said["unproven"]:
            return (
                f"rank {rank} of SGLang has parameters that the update does not fill wholly: "
                f"{_some(said['unproven'])}"
            )
    unused = set.intersection(*(set(said["unused"]) for said in found))
    if unused:
        return f"no rank of SGLang serves {_some(sorted(unused))} of the update"
    return ""


def _some(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
