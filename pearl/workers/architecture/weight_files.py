"""Whether the weight files of a model directory are all there and as long as they say. Reads headers only."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def file_problems(directory: Path) -> list[str]:
    """List what would keep the weights from being loaded; empty means nothing that headers can show."""
    if (directory / INDEX).is_file():
        return list(_of_index(directory))
    if (directory / SINGLE).is_file():
        return list(_of_file(directory / SINGLE))
    if any((directory / name).is_file() for name in PICKLED):
        return []
    return [f"it has no weight file: neither {SINGLE} nor {INDEX}, and nothing is ever downloaded"]


def _of_index(directory: Path) -> Iterator[str]:
    try:
        parsed: Any = json.loads((directory / INDEX).read_bytes())
        names = sorted(set(parsed["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{INDEX} is no index of weight files"
        return
    for name in names:
        path = directory / str(name)
        if path.is_file():
            yield from _of_file(path)
        else:
            yield f"{name}, which {INDEX} names, is not there"


def _of_file(path: Path) -> Iterator[str]:
    size = path.stat().st_size
    try:
        expected = _expected_bytes(path)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        yield f"{path.name} is no safetensors file, or one that is cut off within its header ({size} bytes)"
        return
    if size < expected:
        yield f"{path.name} is cut off: it has {size} bytes, its header describes {expected}"
    elif size > expected:
        yield f"{path.name} has {size} bytes, its header describes {expected}"


def _expected_bytes(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", _exactly(file.read(8), 8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(length)
        header = json.loads(_exactly(file.read(length), length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))


def _exactly(data: bytes, count: int) -> bytes:
    if len(data) != count:
        raise ValueError(len(data))
    return data
