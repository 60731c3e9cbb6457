"""What "the same weights" means: a canonical list of a model's tensors and one checksum over it.

Trainer, links and engines all use this, so that equal checksums prove equal weights wherever they are held.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import xxhash


def canonical_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The model's parameters and persistent buffers, sorted by name; tied ones once, under the first name."""
    seen: set[int] = set()
    tensors: list[tuple[str, torch.Tensor]] = []
    # keep_vars: tied entries are then the same object, which detached views would hide.
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors.append((name, tensor.detach()))
    return tensors


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; a view when it is contiguous and on the host, else a copy."""
    return byte_tensor(tensor.detach().cpu()).numpy().data


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a flat uint8 tensor on the same device, without a copy when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class WeightsHasher:
    """The checksum of ``weights_checksum``, fed piece by piece: ``begin`` each tensor, then all its bytes."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._name: str | None = None

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Start the next tensor. Raises ValueError when the names do not grow."""
        if self._name is not None and name <= self._name:
            raise ValueError(f"tensor {name!r} comes after {self._name!r}: each name once, in sorted order")
        self._name = name
        # The encoding is self-delimiting, so no two lists of tensors share one stream of bytes.
        self._hash.update(msgspec.msgpack.encode((name, dtype, shape)))

    def update(self, data: Any) -> None:
        """Add bytes of the current tensor; anything with the buffer interface."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def weights_checksum(tensors: Iterable[tuple[str, str, tuple[int, ...], Any]]) -> str:
    """xxh3-128, hex, over (name, dtype, shape, bytes) of every tensor in name order, whatever order they come in.

    ``dtype`` is the torch name without its prefix and the bytes are row-major. A name given twice is a ValueError.
    """
    hasher = WeightsHasher()
    for name, dtype, shape, data in sorted(tensors, key=lambda entry: entry[0]):
        hasher.begin(name, dtype, tuple(shape))
        hasher.update(data)
    return hasher.hexdigest()


def model_checksum(model: torch.nn.Module) -> str:
    """``weights_checksum`` of a model's canonical tensors as they are now."""
    return weights_checksum(
        (name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))
        for name, tensor in canonical_tensors(model)
    )
