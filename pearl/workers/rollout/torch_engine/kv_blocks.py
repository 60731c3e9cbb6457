"""KV of some tokens as one contiguous block of bytes in host memory, out of the paged store and into it.

Letters as in ``attention``; the order of bytes is ``KvLayout``'s.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from pearl.workers.rollout.kv_transfer.frames import KvLayout, Layer
from pearl.workers.rollout.kv_transfer.pages import Block
from pearl.workers.rollout.torch_engine.attention import KvStore
from pearl.workers.weight_transfer.checksum import dtype_name

Slots = npt.NDArray[np.int64]


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
def read_block(store: KvStore, slots: Slots) -> Block:
    """A copy of the KV in these token places."""
    layout, pages = layout_of(store), _pages(slots, store.page_tokens)
    block = np.empty(len(slots) * layout.bytes_per_token, np.uint8)
    for layer, *targets in _views(block, layout, len(slots)):
        for stored, target_KTD in zip(store.layers[layer], targets, strict=True):
            if stored.device.type != "cpu":
                places = torch.from_numpy(slots).to(stored.device)
                target_KTD.copy_(stored.flatten(1, 2).index_select(1, places))
            elif pages is None:
                torch.index_select(stored.flatten(1, 2), 1, torch.from_numpy(slots), out=target_KTD)
            else:
                target = target_KTD.view(len(stored), len(pages), *stored.shape[2:])
                np.take(_bytes(stored), pages, axis=1, out=_bytes(target), mode="clip")
    return block


@torch.inference_mode()
def write_block(store: KvStore, slots: Slots, block: Block, layout: KvLayout, device: torch.device) -> None:
    pages = _pages(slots, store.page_tokens)
    places = torch.from_numpy(slots).to(device)
    for layer, keys_KTD, values_KTD in _views(block, layout, len(slots)):
        if pages is None or device.type != "cpu" or layer not in store.layers:
            store.write(layer, places, keys_KTD.to(device), values_KTD.to(device))
            continue
        for stored, source_KTD in zip(store.layers[layer], (keys_KTD, values_KTD), strict=True):
            source = source_KTD.view(len(stored), len(pages), *stored.shape[2:])
            _bytes(stored)[:, pages] = _bytes(source)


def _pages(slots: Slots, page_tokens: int) -> Slots | None:
    """The pages whose places these are, when they are whole: copied as such, several times as fast on a CPU."""
    if slots[0] % page_tokens or len(slots) % page_tokens:
        return None
    return slots[::page_tokens] // page_tokens


def _bytes(tensor: torch.Tensor) -> Block:
    return tensor.view(torch.uint8).numpy()


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
