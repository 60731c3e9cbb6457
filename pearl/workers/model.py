"""Builds the policy: the built-in random "tiny-qwen3", or any ``transformers`` causal LM from a directory.

Trainer and engines build from here, so that both hold the same tensors (``links.checksum.canonical_tensors``).
"""

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from pearl.types.config import ModelConfig
from pearl.workers.architecture.dtypes import cast_parameters

TINY_MODEL = "tiny-qwen3"
TINY_MAX_POSITIONS = 32768  # rotary positions are computed, not stored: a high limit costs nothing


def use_one_thread() -> None:
    """Limit torch to one CPU thread. Call once at the start of a process: on models this small more threads
    spend their time waiting for one another, and several workers share a host's cores."""
    torch.set_num_threads(1)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def resolve_device(config: ModelConfig, index: int = 0) -> torch.device:
    """The device that ``model.device`` names; ``index`` is the local rank of this process.

    Raises:
        ValueError: CUDA was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError('model.device = "cuda", but torch finds no CUDA device; use "auto" or "cpu"')
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", index % torch.cuda.device_count())


def build_model(config: ModelConfig, vocabulary_size: int, seed: int | None) -> PreTrainedModel:
    """The model of ``config``, on the CPU, in its dtype and in evaluation mode.

    Args:
        vocabulary_size: ids that must have a row; exact for the built-in model, a minimum for a directory.
        seed: of the built-in model's weights; None when they are to be replaced anyway.

    Raises:
        ValueError: the settings name no model, or one that is too small for the vocabulary.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    build = partial(_build_tiny, vocabulary_size, seed) if config.path == TINY_MODEL else _load
    model = build(config, dtype)
    rows = vocabulary_rows(model)
    if rows < vocabulary_size:
        raise ValueError(
            f"model.path = {config.path!r} has {rows} token ids, the environment uses {vocabulary_size}; "
            "use a model made for this environment's tokenizer"
        )
    model.train(False)
    return model


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Token ids that the model has an embedding for."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _build_tiny(
    vocabulary_size: int, seed: int | None, config: ModelConfig, dtype: torch.dtype
) -> PreTrainedModel:
    settings = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        initializer_range=config.initializer_range,
        max_position_embeddings=TINY_MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        model = Qwen3ForCausalLM(settings)
    cast_parameters(model, dtype)
    return model


def _load(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    if not (Path(config.path) / "config.json").is_file():
        raise ValueError(
            f"model.path = {config.path!r} is not a model directory (no config.json there), and nothing is ever "
            f'downloaded; give the path of a transformers model on this host, or "{TINY_MODEL}"'
        )
    try:
        answer: Any = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # shapes that differ, files that are damaged: no later try can read them
        raise ValueError(f"model.path = {config.path!r} cannot be loaded: {error}") from error
    model, loaded = answer
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(
            f"model.path = {config.path!r} lacks {len(missing)} of the model's weights, {missing[0]!r} among them; "
            "they would be random: use a complete model"
        )
    return cast(PreTrainedModel, model)
