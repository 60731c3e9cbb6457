"""The engine's device memory, by tag. Contents are not kept: weights come anew with an update, KV is recomputed."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from pearl.workers.memory_offload.saver import Saver
from pearl.workers.memory_offload.saver_for import saver_for
from pearl.workers.rollout.protocol import MemoryTag, Released
from pearl.workers.rollout.torch_engine.attention import KvStore
from pearl.workers.weight_transfer.checksum import canonical_tensors


class EngineMemory:
    def __init__(self, model: nn.Module, store: KvStore, device: torch.device, saver: Saver | None) -> None:
        """``saver`` None = that of the device, made when it is first needed."""
        self._device = device
        self._saver = saver
        self._tensors: dict[MemoryTag, Callable[[], Iterable[torch.Tensor]]] = {
            "weights": lambda: (tensor for _, tensor in canonical_tensors(model)),
            "kv_cache": store.tensors,
            # Graphs: this engine captures none.
        }

    def has(self, tag: MemoryTag) -> bool:
        return self._saver is None or not self._saver.is_released(tag)

    def release(self, tags: Iterable[MemoryTag]) -> Released:
        if self._saver is None:
            self._saver = saver_for(self._device)
        found = [
            self._saver.release(tag, self._tensors[tag](), keep=False) for tag in tags if tag in self._tensors
        ]
        return Released(
            sum(part.num_bytes for part in found),
            sum(part.release_s for part in found),
            sum(part.verify_s for part in found),
        )

    def restore(self, tags: Iterable[MemoryTag]) -> None:
        if self._saver is not None:
            for tag in tags:
                self._saver.restore(tag)
