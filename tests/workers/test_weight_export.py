"""What ``pearl export`` writes is what the trainer computes with, for anybody's transformers."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pearl.types.config import Config, ModelConfig, RolloutConfig, TrainingConfig, WarmStartConfig
from pearl.types.messages.training import Sample
from pearl.workers import export
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.output_layer import output_layer, vocabulary_weight
from pearl.workers.training.packing import pack
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.trainer import Trainer, checkpoint_root

CPU = torch.device("cpu")
VOCABULARY = 41
ROWS = 48  # the last seven are padding
IDS = [3, 17, 40, 0, 8, 8, 25, 31, 2]
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
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


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def dense(is_tied: bool) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied))


def experts() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False))


def sample() -> Sample:
    mask = bytes([0, 0, 0, 1, 1, 1, 1, 1, 1])
    ids = torch.tensor(IDS, dtype=torch.int32).numpy().tobytes()
    logprobs = torch.full((len(IDS),), -3.7).numpy().tobytes()
    return Sample(0, 0, 1.0, False, len(IDS), ids, mask, logprobs, mask)


def trained(run_dir: Path, model: ModelConfig) -> Trainer:
    """Train one step and leave the run's settings and two checkpoints."""
    config = Config(
        model=model,
        rollout=RolloutConfig(max_context_tokens=64),
        training=TrainingConfig(learning_rate=0.1),
        warm_start=WarmStartConfig(num_steps=0),
    )
    run_dir.mkdir()
    (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
    store = CheckpointStore(checkpoint_root(run_dir), keep=2)
    own = Trainer(config, VOCABULARY, CPU, store, Progress())
    own.begin(0, ())
    assert own.save()
    own.train(0, [sample(), msgspec.structs.replace(sample(), trajectory=1, reward=0.0)])
    assert own.save()
    return own


def of_directory(tmp_path: Path, model: PreTrainedModel, dtype: Any = "float32") -> ModelConfig:
    source = tmp_path / "source"
    model.save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    return ModelConfig(path=str(source), dtype=dtype, device="cpu")


def run_export(run_dir: Path, out: Path, *more: str) -> int:
    return export.main([str(run_dir), str(out), *more])


@torch.no_grad()
def logprobs_of_trainer(own: Trainer) -> torch.Tensor:
    ids = torch.tensor(IDS, dtype=torch.int32).numpy()
    packed = pack([ids], [torch.arange(1, len(IDS)).numpy()], CPU)
    found = own.policy.score(packed, 1.0).logprobs_M
    own.policy.reshard()
    return found


@torch.no_grad()
def logprobs_of_files(directory: Path) -> tuple[PreTrainedModel, torch.Tensor]:
    """In the dtype of the files, over the real ids alone, as the trainer has them."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model.train(False)
    logits = model(torch.tensor([IDS])).logits[0, :-1, :VOCABULARY].float()
    return model, logits.log_softmax(-1).gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_transformers_gives_the_trainers_logprobs(
    tmp_path: Path, kind: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    source = experts() if kind == "experts" else dense(kind == "tied")
    config = of_directory(tmp_path, source, dtype)
    own = trained(tmp_path / "run", config)
    out = tmp_path / "models" / "out"
    assert run_export(tmp_path / "run", out) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    model, found = logprobs_of_files(out)
    embedding, head = vocabulary_weight(model), output_layer(model).weight
    exact = logprobs_of_trainer(own)
    assert model.dtype == getattr(torch, dtype)
    assert len(embedding) == ROWS
    assert (found - exact).abs().max() < (1e-4 if dtype == "float32" else 0.1)
    _, before = logprobs_of_files(tmp_path / "source")
    assert (before - exact).abs().max() > 0.15  # the step was one
    assert (head is embedding) == (kind == "tied")


def test_expert_names_and_files_beside_the_weights_are_the_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open

    config = of_directory(tmp_path, experts())
    trained(tmp_path / "run", config)
    assert run_export(tmp_path / "run", tmp_path / "out") == 0
    names = []
    for directory in (tmp_path / "source", tmp_path / "out"):
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names[1]
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_the_built_in_model_and_an_older_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = trained(tmp_path / "run", ModelConfig(device="cpu"))
    assert run_export(tmp_path / "run", tmp_path / "new") == 0
    assert run_export(tmp_path / "run", tmp_path / "old", "--step", "0") == 0
    exact = logprobs_of_trainer(own)
    assert (logprobs_of_files(tmp_path / "new")[1] - exact).abs().max() < 1e-4
    assert (logprobs_of_files(tmp_path / "old")[1] - exact).abs().max() > 1e-2
    assert "no tokenizer" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    problem = json.loads(capsys.readouterr().out)["problem"]
    assert isinstance(problem, str)
    return problem


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    trained(run_dir, ModelConfig(device="cpu"))
    capsys.readouterr()

    (tmp_path / "taken").mkdir()
    assert run_export(run_dir, tmp_path / "taken") == 2
    assert "is there already" in refusal(capsys)
    assert run_export(tmp_path, out) == 2
    assert "not a run directory" in refusal(capsys)
    assert run_export(run_dir, out, "--step", "7") == 2
    assert "complete are steps [0, 1]" in refusal(capsys)

    weights = checkpoint_root(run_dir) / "step-000001" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert run_export(run_dir, out) == 2
    assert "is damaged" in refusal(capsys)
    weights.write_bytes(whole[:-1])
    assert run_export(run_dir, out, "--step", "1") == 2
    assert "not a complete checkpoint" in refusal(capsys)
    weights.write_bytes(whole)

    settings = json.loads((run_dir / "config.json").read_bytes())
    settings["model"]["num_layers"] = 3
    (run_dir / "config.json").write_text(json.dumps(settings))
    assert run_export(run_dir, out) == 2
    assert "is not of the model" in refusal(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", ModelConfig(device="cpu"))
    full = os.statvfs_result((4096, 4096, 1 << 20, 10, 10, 1000, 900, 900, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    capsys.readouterr()
    assert run_export(tmp_path / "run", tmp_path / "out") == 1
    assert "GB are free" in refusal(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
