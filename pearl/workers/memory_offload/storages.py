"""The memory behind tensors: distinct storages, their bytes, one digest over all of them."""

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch.distributed.tensor import DTensor

DIGEST_BYTES = 64 << 20
"""Copied to the host at a time when the storage is on a device."""


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, in the order of first appearance; of a sharded tensor this rank's part. Empty ones are left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        with torch.no_grad():
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = own.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A flat uint8 tensor on the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def total_bytes(storages: Sequence[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def digest(storages: Sequence[torch.UntypedStorage]) -> str:
    """xxh3-128, hex, over every byte of them in order."""
    hasher = xxhash.xxh3_128()
    for storage in storages:
        flat = storage_bytes(storage)
        for start in range(0, len(flat), DIGEST_BYTES):
            hasher.update(flat[start : start + DIGEST_BYTES].cpu().numpy().data)
    return hasher.hexdigest()
