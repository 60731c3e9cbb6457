"""What SGLang needs to know of the model before it has weights: a directory with its config.json, and its tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pearl.types.config import ModelConfig
from pearl.workers.model import TINY_MODEL, build_shapes
from pearl.workers.rollout.sglang.pieces import Piece, checkpoint_pieces
from pearl.workers.weight_transfer.checksum import canonical_tensors

NAME = "config.json"
END_TOKEN_KEYS = ("eos_token_id",)
"""Left out: a request says itself which ids end it, as it does for every engine."""


@dataclass(frozen=True, slots=True)
class Model:
    """Without weights."""

    shapes: nn.Module
    """On no device."""
    pieces: tuple[Piece, ...]
    """The tensors of a checkpoint of this model: what SGLang loads."""
    vocabulary_size: int
    num_weight_bytes: int


def write_model(config: ModelConfig, vocabulary_size: int, directory: Path) -> Model:
    """Raises ValueError when the settings name no model, or one that is too small for the vocabulary."""
    if config.path == TINY_MODEL:
        built = build_shapes(config, vocabulary_size)
        content = json.loads(built.config.to_json_string(use_diff=False))
        content["architectures"] = [type(built).__name__]
    else:
        try:
            content = json.loads((Path(config.path) / NAME).read_bytes())
        except OSError as error:
            raise ValueError(
                f"model.path = {config.path!r} is not a model directory ({error}); give the path of a downloaded "
                f'transformers model, or "{TINY_MODEL}"'
            ) from error
    directory.mkdir(parents=True, exist_ok=True)
    (directory / NAME).write_text(json.dumps(_without_ends(content, config.dtype)), encoding="utf-8")
    return _read(directory, config, vocabulary_size)


def _without_ends(content: dict[str, Any], dtype: str) -> dict[str, Any]:
    kept = {key: value for key, value in content.items() if key not in END_TOKEN_KEYS}
    return {key: value for key, value in kept.items() if key not in ("torch_dtype", "dtype")} | {
        "torch_dtype": dtype
    }


def _read(directory: Path, config: ModelConfig, vocabulary_size: int) -> Model:
    settings = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=getattr(torch, config.dtype)
        )
    rows = shapes.get_input_embeddings().weight.shape[0]
    if rows < vocabulary_size:
        raise ValueError(
            f"model.path = {config.path!r} has {rows} token ids, the environment uses {vocabulary_size}; "
            "use a model made for this environment's tokenizer"
        )
    canonical = canonical_tensors(shapes)
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in canonical)
    return Model(shapes, checkpoint_pieces(shapes), rows, num_bytes)
