"""Building the policy, and the engine on other architectures than the built-in one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pearl.types.config import ModelConfig
from pearl.types.messages.rollout import SamplingParams
from pearl.types.weights import BucketSpec, Version
from pearl.workers import model as model_module
from pearl.workers.model import build_model, check_precision, resolve_device
from pearl.workers.rollout.protocol import Delta, GenerateRequest
from pearl.workers.rollout.torch_engine.core import EngineCore
from pearl.workers.rollout.torch_engine.settings import EngineSettings
from pearl.workers.weight_transfer.checksum import canonical_tensors, dtype_name, model_checksum, tensor_bytes
from pearl.workers.weight_transfer.snapshot_layout import image_bytes, lay_out

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = (model_checksum(build_model(ModelConfig(), 32, seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_building_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_model(ModelConfig(), 32, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_tied_weights_are_one_tensor_under_the_first_name() -> None:
    names = dict(canonical_tensors(build_model(ModelConfig(), 32, 1)))
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names


def test_a_missing_model_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path = .*nowhere.*tiny-qwen3"):
        build_model(ModelConfig(path=str(tmp_path / "nowhere")), 32, 0)


def test_a_model_with_too_few_ids_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="40 token ids, the environment uses 41"):
        build_model(ModelConfig(path=str(tmp_path)), 41, 0)


def test_cuda_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(model_module, "driver_version", lambda: "535.104.05")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device(ModelConfig()).type == "cpu"
    with pytest.raises(ValueError, match=r"model\.device"):
        resolve_device(ModelConfig(device="cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert resolve_device(ModelConfig(device="cpu")).type == "cpu"
    with pytest.raises(
        ValueError, match=r"built for CUDA 12\.8, finds no CUDA device .*'3', NVIDIA driver 535\.104\.05"
    ):
        resolve_device(ModelConfig())


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(ModelConfig(), 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="2 GPUs, and number 2 has none"):
        resolve_device(ModelConfig(), 2)


def test_large_models_are_not_computed_in_float32_on_gpus() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"8\.2 billion parameters, and above 2 billion float32 is refused"):
        check_precision(ModelConfig(), gpu, 8_200_000_000)
    check_precision(ModelConfig(dtype="bfloat16"), gpu, 8_200_000_000)
    check_precision(ModelConfig(), gpu, 600_000_000)
    check_precision(ModelConfig(), cpu, 8_200_000_000)


def run(
    model: PreTrainedModel, contexts: list[list[int]], count: int, vocabulary_size: int | None = None
) -> list[list[Delta]]:
    """Greedy answers of an engine that was handed the model's own weights."""
    core = EngineCore(model, EngineSettings(prefill_chunk_tokens=16, vocabulary_size=vocabulary_size))
    tensors = canonical_tensors(model)
    specs = lay_out((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors)
    data = bytearray(image_bytes(specs))
    for spec, (_, tensor) in zip(specs, tensors, strict=True):
        data[spec.offset : spec.offset + spec.num_bytes] = tensor_bytes(tensor)
    core.begin_update(Version(0, 1), specs)
    core.update_bucket(BucketSpec(0, len(data), ""), memoryview(data))
    core.end_update()
    for attempt, context in enumerate(contexts):
        core.submit(
            GenerateRequest(attempt, np.array(context, np.int32), SamplingParams(count, 0.0, ()), attempt)
        )
    while core.step():
        pass
    return [[delta for delta in core.deltas if delta.attempt == a] for a in range(len(contexts))]


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=12)),
    ],
    ids=["llama", "qwen2", "mistral, sliding window"],
)
def test_other_architectures_answer_like_their_own_generate(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = build_model(ModelConfig(path=str(tmp_path)), 40, 0)
    contexts = [[1, 2, 3], list(range(40)), [7] * 17]
    found = [[token for delta in deltas for token in delta.ids] for deltas in run(loaded, contexts, 20)]
    for context, answer in zip(contexts, found, strict=True):
        tokens = torch.tensor([context])
        output = model.train(False).generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert output[0, len(context) :].tolist() == answer


def test_a_model_whose_attention_cannot_be_replaced_is_refused_not_run() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match="BloomForCausalLM: its attention cannot be replaced"):
        EngineCore(model, EngineSettings())


def test_parameters_are_cast_and_rotary_frequencies_are_not() -> None:
    model = build_model(ModelConfig(dtype="bfloat16"), 32, 1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_padded_rows_are_never_drawn() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": False}))
    with torch.no_grad():
        weight = model.get_submodule("lm_head").weight
        assert isinstance(weight, torch.Tensor)
        weight[30:] = 50.0 * weight[:10].abs()
    whole, kept = (run(model, [[1, 2, 3], [4] * 9], 12, size) for size in (40, 30))
    assert max(token for deltas in whole for delta in deltas for token in delta.ids) >= 30
    assert max(token for deltas in kept for delta in deltas for token in delta.ids) < 30
    assert all(delta.finish != "error" for deltas in kept for delta in deltas)
