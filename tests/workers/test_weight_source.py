"""A model's first weights, read in parts into shapes without memory, against ``from_pretrained``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pearl.types.config import ModelConfig
from pearl.workers import weight_source
from pearl.workers.model import build_empty, build_model, build_shapes, first_weights
from pearl.workers.weight_source import LoadedWeights, SafetensorsWeights
from pearl.workers.weight_transfer.checksum import canonical_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}


def saved(model: PreTrainedModel, path: Path, shard_size: str = "20KB") -> ModelConfig:
    model.save_pretrained(path, max_shard_size=shard_size)
    return ModelConfig(path=str(path), device="cpu")


def read_whole(config: ModelConfig) -> dict[str, torch.Tensor]:
    model = build_shapes(config, 41)
    source = first_weights(config, model, 0)
    return {name: source.rows(name, 0, len(tensor)) for name, tensor in canonical_tensors(model)}


def assert_same(found: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    expected = dict(canonical_tensors(model))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize("shard_size", ["20KB", "1GB"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_read_in_parts_is_what_transformers_loads(
    tmp_path: Path, is_tied: bool, shard_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = saved(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied)), tmp_path, shard_size)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr(weight_source, "LoadedWeights", None)  # it is not needed
    assert_same(read_whole(config), expected)


def test_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    config = saved(Qwen3ForCausalLM(Qwen3Config(**SIZES)), tmp_path)
    model = build_shapes(config, 41)
    source = first_weights(config, model, 0)
    for name, tensor in canonical_tensors(model):
        whole = source.rows(name, 0, len(tensor))
        assert torch.equal(source.rows(name, 3, 7), whole[3:7])


def test_tensors_that_transformers_converts_are_loaded_by_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = saved(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)), tmp_path)
    assert isinstance(first_weights(config, build_shapes(config, 41), 0), LoadedWeights)
    assert_same(read_whole(config), AutoModelForCausalLM.from_pretrained(tmp_path))


def test_files_with_other_shapes_are_not_read_in_parts(tmp_path: Path) -> None:
    saved(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
    other = LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 64}))
    assert SafetensorsWeights.of(tmp_path, other) is None


def test_random_weights_do_not_depend_on_what_else_is_made() -> None:
    config = ModelConfig()
    whole = dict(canonical_tensors(build_model(config, 32, 5)))
    source = first_weights(config, build_shapes(config, 32), 5)
    for name, tensor in reversed(whole.items()):
        assert torch.equal(source.rows(name, 1, 4), tensor[1:4])
    spread = whole["lm_head.weight"].std().item()
    assert spread == pytest.approx(config.initializer_range, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_empty_model_has_the_tensors_of_a_loaded_one(tmp_path: Path, is_tied: bool, dtype: Any) -> None:
    settings = LlamaConfig(**SIZES, tie_word_embeddings=is_tied)
    saved(LlamaForCausalLM(settings), tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype=dtype)
    empty, loaded = build_empty(config, 41), build_model(config, 41, 0)
    expected = [(name, tensor.dtype, tensor.shape) for name, tensor in canonical_tensors(loaded)]
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in canonical_tensors(empty)] == expected
    assert not any(parameter.any() for parameter in empty.parameters())
    for (name, buffer), (other, expected_buffer) in zip(
        empty.named_buffers(), loaded.named_buffers(), strict=True
    ):
        assert name == other
        assert torch.equal(buffer, expected_buffer)


def test_shapes_have_no_memory() -> None:
    sizes = ModelConfig(num_layers=30, hidden_size=1 << 13, ffn_size=1 << 15)
    model = build_shapes(sizes, 1 << 15)  # 100 GB of weights
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"  # afterwards all is as before
