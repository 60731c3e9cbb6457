"""Where a model's first weights come from, readable in parts: no process needs room for more than it keeps.

A source gives rows of a tensor by its canonical name, whatever it has to read for them.
"""

import json
import logging
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from pearl.workers.weight_transfer.checksum import canonical_tensors

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class WeightSource(Protocol):
    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Rows ``start`` to ``end`` of the first dimension, on the CPU; a scalar whole."""
        ...


class RandomWeights:
    """A tensor's values depend on seed, name and shape alone, so that any part of a model can be made by itself."""

    def __init__(self, model: PreTrainedModel, seed: int, standard_deviation: float) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(model)}
        self._seed = seed
        self._standard_deviation = standard_deviation

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) < 2:  # the weights of a norm
            return torch.ones(shape)[start:end]
        seed = xxhash.xxh3_64_intdigest(name.encode(), seed=self._seed % (1 << 64)) >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape).normal_(0.0, self._standard_deviation, generator=generator)[start:end]


class SafetensorsWeights:
    """The files of a model directory. They are mapped: what is not asked for is not read."""

    def __init__(self, directory: Path, files: dict[str, str], names: dict[str, str]) -> None:
        """``names``: of each canonical tensor in the files."""
        self._directory = directory
        self._files = files
        self._names = names
        self._open: dict[str, Any] = {}  # safetensors has no type information

    @classmethod
    def of(cls, directory: Path, model: PreTrainedModel) -> Self | None:
        """None when the files do not hold ``model``'s tensors as they are: renamed, fused, or in another format."""
        files = _files(directory)
        if any(isinstance(change, WeightConverter) for change in get_model_conversion_mapping(model)):
            return None
        names = {}
        for name, known in aliases(model).items():
            stored = next((alias for alias in known if alias in files), None)
            if stored is None:
                return None
            names[name] = stored
        found = cls(directory, files, names)
        is_alike = all(found.shape(name) == tuple(tensor.shape) for name, tensor in canonical_tensors(model))
        return found if is_alike else None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        found = self._slice(name)
        part: torch.Tensor = found[start:end] if found.get_shape() else found[:]
        return part

    def _slice(self, name: str) -> Any:
        stored = self._names[name]
        file = self._files[stored]
        if file not in self._open:
            self._open[file] = safe_open(self._directory / file, framework="pt", device="cpu")
        return self._open[file].get_slice(stored)


class LoadedWeights:
    """A model that ``transformers`` has loaded whole, in the dtype of its files."""

    def __init__(self, directory: Path) -> None:
        log.info("%s: transformers converts its tensors, each rank loads the model whole to do so", directory)
        self._tensors = dict(canonical_tensors(load_whole(directory, "auto")))

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor[start:end] if tensor.dim() else tensor


def load_whole(directory: Path, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """The way of ``transformers``, for any of its formats.

    Raises:
        ValueError: the files cannot be read, or do not hold all of the model.
    """
    try:
        answer: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    # Shapes that differ, files that are damaged: no later try can read them.
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"model.path = '{directory}' cannot be loaded: {error}") from error
    model, loaded = answer
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(
            f"model.path = '{directory}' lacks {len(missing)} of the model's weights, {missing[0]!r} among them; "
            "they would be random: use a complete model"
        )
    return cast(PreTrainedModel, model)


def open_directory(directory: Path, model: PreTrainedModel) -> WeightSource:
    """The weights of ``model``, whose tensors may be on no device yet."""
    try:
        found = SafetensorsWeights.of(directory, model)
    except SafetensorError:  # whatever is wrong with it, the other way says so
        found = None
    return found or LoadedWeights(directory)


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Canonical name -> all names that the tensor goes by."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        by_identity.setdefault(id(tensor), []).append(name)
    return {names[0]: names for names in by_identity.values()}


def _files(directory: Path) -> dict[str, str]:
    """Stored name -> file; empty when the directory has no safetensors."""
    if (directory / INDEX).is_file():
        index: dict[str, dict[str, str]] = json.loads((directory / INDEX).read_bytes())
        return index["weight_map"]
    if not (directory / SINGLE).is_file():
        return {}
    with safe_open(directory / SINGLE, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), SINGLE)
