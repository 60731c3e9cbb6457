"""What PEARL adds inside SGLang's processes: a loader of whole images, and sampling by counter.

Imports torch and SGLang, nothing of PEARL. The loader answers through files, since an exception in it would end the
scheduler, and the server with it.
"""

import json
import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameters that SGLang makes of several tensors of a checkpoint, one after the other along the first axis."""
MAX_PADDING_ROWS = 64
"""SGLang pads a vocabulary to a multiple of this."""

Tensors = dict[str, torch.Tensor]


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A custom weight loader. The one name is JSON: path of the image, its tensors with all names they go by, and
    where to answer; every rank reads the same image and takes its part."""
    order = json.loads(named_tensors[0][0])
    rank, size = _place()
    try:
        answer = _load(model, order, rank, size)
    # Whatever is wrong with weights or model belongs to the worker, who reads the answer; the scheduler lives on.
    except Exception as error:  # noqa: BLE001
        answer = {"error": f"{type(error).__name__}: {error}"}
    path = f"{order['answer']}.{rank}"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.rename(f"{path}.new", path)


def _load(model: torch.nn.Module, order: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    with open(order["image"], "rb") as file:
        image = mmap.mmap(file.fileno(), order["num_bytes"], access=mmap.ACCESS_COPY)
    tensors = _views(image, order["tensors"])
    model.load_weights(_named(order["tensors"], tensors))  # type: ignore[operator]
    served = dict(model.named_parameters()) | dict(model.named_buffers())
    wrong, unknown = [], []
    for names, *_ in order["tensors"]:
        parts = [part for name in names for part in _served(served, tensors, name, rank, size)]
        if not parts:
            unknown.append(names[0])
        elif not all(torch.equal(theirs.cpu(), ours) for theirs, ours in parts):
            wrong.append(names[0])
    return {"wrong": wrong, "unknown": unknown, "num_tensors": len(order["tensors"])}


def _views(image: mmap.mmap, specs: list[list[Any]]) -> Tensors:
    """Name -> tensor over the image's own memory, under every name it goes by."""
    found = {}
    for names, dtype, shape, offset, num_bytes in specs:
        raw = torch.frombuffer(image, dtype=torch.uint8, count=num_bytes, offset=offset)
        kind = getattr(torch, dtype)
        if offset % kind.itemsize:
            raw = raw.clone()
        tensor = raw.view(kind).view(shape)
        found.update(dict.fromkeys(names, tensor))
    return found


def _named(specs: list[list[Any]], tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for names, *_ in specs:
        for name in names:
            yield name, tensors[name]


def _served(
    served: Tensors, tensors: Tensors, name: str, rank: int, size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what this rank serves, what it should be) for a tensor of the image; empty when it has no such parameter."""
    if name in served:
        part = _shard(served[name], tensors[name], rank, size)
        return [] if part is None else [part]
    for fused, parts in FUSED.items():
        for part_name in parts:
            if f".{part_name}." in name:
                whole = served.get(name.replace(part_name, fused))
                siblings = [tensors.get(name.replace(part_name, other)) for other in parts]
                if whole is None or any(sibling is None for sibling in siblings):
                    return []
                return _slice(whole, siblings, parts.index(part_name), rank, size)  # type: ignore[arg-type]
    return []


def _slice(
    whole: torch.Tensor, siblings: list[torch.Tensor], index: int, rank: int, size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = [len(sibling) // size for sibling in siblings]
    if sum(rows) != len(whole):  # heads that are replicated over ranks, or another way of packing
        return []
    start = sum(rows[:index])
    ours = siblings[index][rank * rows[index] : (rank + 1) * rows[index]]
    return [(whole[start : start + rows[index]], ours)]


def _shard(
    theirs: torch.Tensor, ours: torch.Tensor, rank: int, size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if theirs.shape == ours.shape:
        return theirs, ours
    if theirs.dim() != ours.dim() or theirs.dtype != ours.dtype:
        return None
    rows = len(theirs)
    if theirs.shape[1:] == ours.shape[1:] and 0 <= rows * size - len(ours) < MAX_PADDING_ROWS * size:
        part = ours[rank * rows : (rank + 1) * rows]
        return theirs[: len(part)], part
    if theirs.dim() == 2 and rows == len(ours) and theirs.shape[1] * size == ours.shape[1]:
        columns = theirs.shape[1]
        return theirs, ours[:, rank * columns : (rank + 1) * columns].contiguous()
    return None


def _place() -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size


# Sampling


def draw(probs_NV: torch.Tensor, keys_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """One id a row, by inverse transform with the uniform number of (key, position): as PEARL's own engine draws it,
    so that the same weights give the same tokens on any worker, in any batch and after any interruption."""
    cumulative_NV = probs_NV.double().cumsum(-1)
    target_N1 = _uniform(keys_N, positions_N)[:, None] * cumulative_NV[:, -1:]
    ids_N = torch.searchsorted(cumulative_NV, target_N1, right=True)[:, 0]
    return ids_N.clamp_(max=probs_NV.shape[1] - 1)


def _uniform(keys_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Draw uniforms in [0, 1) by SplitMix64 from state ``key`` on; signed arithmetic wraps as unsigned does."""
    z = keys_N + (positions_N.to(torch.int64) + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """Shift to the right without the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def activate() -> None:
    """SGLang's plugin."""
    _share_loads_in(os.environ["PEARL_SGLANG_FILES"])
    _draw_by_counter()


def _share_loads_in(directory: str) -> None:
    """Set the directory of the file by which SGLang's processes share their load: the default is /dev/shm, where
    it would stay when they are killed."""
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda name: os.path.join(directory, f"loads_{os.path.basename(name)}")


def _draw_by_counter() -> None:
    """Every request is sampled with its own key and the position. SGLang knows that only together
    with its batch-invariant kernels, and not beside its default sampler. Requests of PEARL have a temperature and
    nothing else, or are greedy, which SGLang calls "the best one of the top"."""
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: type, batch: Any, *arguments: Any, **options: Any) -> Any:
        info = original(cls, batch, *arguments, **options)
        keys = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(keys, dtype=torch.int64).to(info.temperatures.device)
        return info

    def sample(
        self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
    ) -> tuple[torch.Tensor, None]:
        # SGLang's positions are of the last token that was computed; the draw is named after the one it makes.
        ids = draw(probs, info.sampling_seed, positions + 1)
        return torch.where(info.top_ks == 1, probs.argmax(-1), ids).to(torch.int32), None

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    Sampler._sample_from_probs = sample
