"""KV of some tokens as one contiguous block of bytes in host memory, out of the paged store and into it.

Letters as in ``attention``; the order of bytes is ``KvLayout``'s.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from pearl.workers.links.checksum import dtype_name
from pearl.workers.rollout.kv_transfer.frames import KvLayout, Layer
from pearl.workers.rollout.kv_transfer.pages import Block
from pearl.workers.rollout.torch_engine.attention import KvStore


def layout_of(store: KvStore) -> KvLayout:
    """Without layers as long as nothing was ever stored."""
    layers = sorted(store.layers.items())
    dtype = dtype_name(layers[0][1][0].dtype) if layers else "float32"
    return KvLayout(
        dtype,
        tuple(
            Layer(index, keys.shape[0], keys.shape[3], values.shape[3]) for index, (keys, values) in layers
        ),
    )


@torch.inference_mode()
def read_block(store: KvStore, slots: npt.NDArray[np.int64]) -> Block:
    """A copy of the KV in these token places."""
    layout = layout_of(store)
    block = np.empty(len(slots) * layout.bytes_per_token, np.uint8)
    for layer, keys_KTD, values_KTD in _views(block, layout, len(slots)):
        for stored, target in zip(store.layers[layer], (keys_KTD, values_KTD), strict=True):
            places = torch.from_numpy(slots).to(stored.device)
            if stored.is_cuda:
                target.copy_(stored.flatten(1, 2).index_select(1, places))
            else:
                torch.index_select(stored.flatten(1, 2), 1, places, out=target)
    return block


@torch.inference_mode()
def write_block(
    store: KvStore, slots: npt.NDArray[np.int64], block: Block, layout: KvLayout, device: torch.device
) -> None:
    places = torch.from_numpy(slots).to(device)
    for layer, keys_KTD, values_KTD in _views(block, layout, len(slots)):
        store.write(layer, places, keys_KTD.to(device), values_KTD.to(device))


def _views(
    block: Block, layout: KvLayout, num_tokens: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    data, position = torch.from_numpy(block).view(dtype), 0
    for layer in layout.layers:
        views = []
        for size in (layer.key_size, layer.value_size):
            count = layer.num_heads * num_tokens * size
            views.append(data[position : position + count].view(layer.num_heads, num_tokens, size))
            position += count
        yield layer.index, views[0], views[1]
