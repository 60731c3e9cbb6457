"""What PEARL adds inside SGLang's processes: a loader of whole images, and sampling by counter.

Imports torch and SGLang, nothing of PEARL. The loader answers through files, since an exception in it would end the
scheduler, and the server with it.
"""

import json
import math
import mmap
import os
from typing import Any

import torch
from pearl_read_back import Pieces, read_back

Piece = tuple[str, str, int, list[int], list[int]]
"""Name in a checkpoint, dtype, first byte in the image, shape, strides in elements."""


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A custom weight loader. The one name is JSON: path of the image, its pieces under the names of a checkpoint, and
    where to answer; every rank reads the same image, takes its part, and compares what it then holds."""
    order = json.loads(named_tensors[0][0])
    try:
        answer = _load(model, order)
    # Whatever is wrong with weights or model belongs to the worker, who reads the answer; the scheduler lives on.
    except Exception as error:  # noqa: BLE001
        answer = {"error": f"{type(error).__name__}: {error}"}
    path = f"{order['answer']}.{_rank()}"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.rename(f"{path}.new", path)


def _load(model: torch.nn.Module, order: dict[str, Any]) -> dict[str, Any]:
    model.load_weights(iter(_pieces(order)))  # type: ignore[operator]
    # Mapped anew: a loader may have changed what it was given.
    return dict(read_back(model, _pieces(order)))


def _pieces(order: dict[str, Any]) -> Pieces:
    with open(order["image"], "rb") as file:
        image = mmap.mmap(file.fileno(), order["num_bytes"], access=mmap.ACCESS_COPY)
    return _views(image, order["pieces"])


def _views(image: mmap.mmap, specs: list[Piece]) -> Pieces:
    """Tensors over the image's own memory; those at one place share a storage."""
    storages: dict[tuple[int, str], torch.Tensor] = {}
    found = []
    for name, dtype, first_byte, shape, strides in specs:
        kind: torch.dtype = getattr(torch, dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) == 0:
            found.append((name, torch.empty(shape, dtype=kind)))
            continue
        flat = storages.get((first_byte, dtype))
        if flat is None or len(flat) < extent:
            raw = torch.frombuffer(image, dtype=torch.uint8, count=extent * kind.itemsize, offset=first_byte)
            # A clone where the layout is not aligned for the dtype: a view would be refused.
            flat = storages[first_byte, dtype] = (raw.clone() if first_byte % kind.itemsize else raw).view(
                kind
            )
        found.append((name, flat.as_strided(shape, strides)))
    return found


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    rank: int = get_parallel().tp_rank
    return rank


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
