"""Builds the policy: the built-in random "tiny-qwen3", or any ``transformers`` causal LM from a directory.

Trainer and engines build from here, so that both hold the same tensors (``canonical_tensors``).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from pearl.runtime.gpus import VISIBLE_VARIABLE, driver_version
from pearl.types.config import ModelConfig
from pearl.workers.architecture.dtypes import ServedDtypes, cast_persistent_buffers
from pearl.workers.weight_source import RandomWeights, WeightSource, load_whole, open_directory
from pearl.workers.weight_transfer.checksum import canonical_tensors

TINY_MODEL = "tiny-qwen3"
MAX_FLOAT32_PARAMETERS = 2_000_000_000
"""On a GPU; more of them are nearly always a setting that was forgotten."""
TINY_MAX_POSITIONS = 32768  # rotary positions are computed, not stored: a high limit costs nothing


def use_one_thread() -> None:
    """Limit torch to one CPU thread. Call once at the start of a process: on models this small more threads
    spend their time waiting for one another, and several workers share a host's cores."""
    torch.set_num_threads(1)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def resolve_device(config: ModelConfig, index: int = 0) -> torch.device:
    """The device that ``model.device`` names; ``index`` is the local rank of this process.

    A process that was given GPUs (``CUDA_VISIBLE_DEVICES`` names some) uses them or fails.

    Raises:
        ValueError: CUDA was asked for and is not there, or this process has no GPU of its own.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    given = os.environ.get(VISIBLE_VARIABLE, "").strip()
    if not torch.cuda.is_available():
        if config.device == "cuda" or given:
            raise ValueError(_no_cuda(given))
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"{VISIBLE_VARIABLE}={given!r} gives this host's processes {count} GPUs, and number {index} has none: "
            "one GPU a process is needed"
        )
    return torch.device("cuda", index)


def _no_cuda(given: str) -> str:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    return (
        f"torch {torch.__version__}, built for {built_for}, finds no CUDA device ({VISIBLE_VARIABLE}={given!r}, NVIDIA "
        f"driver {driver_version() or 'not found'}): install a torch build for a CUDA version that the driver "
        'supports, or set model.device = "cpu"'
    )


def check_precision(config: ModelConfig, device: torch.device, num_parameters: int) -> None:
    """Refuse to compute large models in float32 on GPUs.

    Raises:
        ValueError: says why and what to set.
    """
    if device.type == "cuda" and config.dtype == "float32" and num_parameters > MAX_FLOAT32_PARAMETERS:
        raise ValueError(
            f"model.dtype = float32: the model has {num_parameters / 1e9:.1f} billion parameters, and above "
            f"{MAX_FLOAT32_PARAMETERS / 1e9:g} billion float32 is refused on GPUs: it takes twice the memory for "
            "weights, activations and KV, and leaves the tensor cores' fast formats unused; use bfloat16, the "
            "optimizer keeps float32 weights anyway"
        )


def build_model(config: ModelConfig, vocabulary_size: int, seed: int) -> PreTrainedModel:
    """The model of ``config`` with its first weights, on the CPU, in its dtype and in evaluation mode.

    Args:
        vocabulary_size: ids that must have a row; exact for the built-in model, a minimum for a directory.
        seed: of the built-in model's weights.

    Raises:
        ValueError: the settings name no model, or one that is too small for the vocabulary.
    """
    if config.path == TINY_MODEL:
        model = build_empty(config, vocabulary_size)
        source = first_weights(config, model, seed)
        for name, tensor in canonical_tensors(model):
            tensor.copy_(source.rows(name, 0, len(tensor)))
        return model
    return _checked(_load(config), config, vocabulary_size)


def build_empty(config: ModelConfig, vocabulary_size: int) -> PreTrainedModel:
    """Build the model with zeros for weights that are replaced anyway. Reads and computes none."""
    model = build_shapes(config, vocabulary_size)
    served = ServedDtypes(model, getattr(torch, config.dtype))
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def materialize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.zeros(tensor.shape, dtype=served.of(names[id(tensor)], tensor))

    # A module that replaced its parameters would untie what is one tensor under several names.
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = nn.Parameter(materialize(parameter))
            setattr(module, name, replaced[id(parameter)])
    cast_persistent_buffers(model, served)
    return model


def build_shapes(config: ModelConfig, vocabulary_size: int) -> PreTrainedModel:
    """The model of ``config`` in float32 and evaluation mode, its parameters on no device, its buffers on the CPU.

    Raises:
        ValueError: as ``build_model``.
    """
    if config.path == TINY_MODEL:
        settings: PreTrainedConfig = _tiny_settings(config, vocabulary_size)
    else:
        _check_directory(config)
        settings = AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return _checked(model, config, vocabulary_size)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that modules get meanwhile have shapes and no memory. Buffers, which a module computes, are real."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def first_weights(config: ModelConfig, model: PreTrainedModel, seed: int) -> WeightSource:
    """Return the first weights of ``model``, made by ``build_shapes`` or ``build_empty`` and not sharded yet."""
    if config.path == TINY_MODEL:
        return RandomWeights(model, seed, config.initializer_range)
    return open_directory(Path(config.path), model)


def _checked(model: PreTrainedModel, config: ModelConfig, vocabulary_size: int) -> PreTrainedModel:
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


def _tiny_settings(config: ModelConfig, vocabulary_size: int) -> Qwen3Config:
    return Qwen3Config(
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


def _check_directory(config: ModelConfig) -> None:
    if not (Path(config.path) / "config.json").is_file():
        raise ValueError(
            f"model.path = {config.path!r} is not a model directory (no config.json there), and nothing is ever "
            f'downloaded; give the path of a transformers model on this host, or "{TINY_MODEL}"'
        )


def _load(config: ModelConfig) -> PreTrainedModel:
    _check_directory(config)
    return load_whole(Path(config.path), getattr(torch, config.dtype))
