"""What is found wrong with a model before anything starts, and that a good one passes."""

import json
from pathlib import Path

import msgspec
import pytest
from models_page import PAGE, table, with_table
from tiny_models import CONFIGS, make_model
from transformers import PreTrainedConfig, T5Config

from pearl.types.config import Config, ModelConfig, RolloutConfig
from pearl.types.model_report import ModelReport
from pearl.workers.architecture import probe
from pearl.workers.architecture.probe import examine
from pearl.workers.architecture.sglang_models import served_architectures
from pearl.workers.model import build_model


def report_on(directory: Path, max_context_tokens: int = 96, **model: str) -> ModelReport:
    settings = msgspec.convert({"path": str(directory), **model}, ModelConfig)
    return examine(Config(model=settings, rollout=RolloutConfig(max_context_tokens=max_context_tokens)))


def only_problem(report: ModelReport) -> str:
    [problem] = report.problems
    return problem


@pytest.fixture
def good(tmp_path: Path) -> Path:
    make_model(CONFIGS["qwen3"](), tmp_path)
    return tmp_path


def test_a_good_model_passes(good: Path) -> None:
    assert report_on(good) == ModelReport("Qwen3ForCausalLM")
    assert report_on(good, dtype="bfloat16").problems == ()


def test_a_missing_weight_file_is_named(good: Path) -> None:
    (good / "model.safetensors").unlink()
    assert "no weight file" in only_problem(report_on(good))


@pytest.mark.parametrize("size", [0, 5, 300, -1], ids=["empty", "length", "header", "data"])
def test_a_truncated_weight_file_is_named(good: Path, size: int) -> None:
    path = good / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:size])
    assert "model.safetensors" in only_problem(report_on(good))


def test_a_missing_and_a_truncated_shard_are_named(good: Path) -> None:
    (good / "model.safetensors").rename(good / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (good / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in only_problem(report_on(good))


def test_weights_that_files_lack_are_not_made_up(good: Path) -> None:
    config = json.loads((good / "config.json").read_text())
    (good / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights"):
        build_model(ModelConfig(path=str(good)), 40, 0)


def test_weights_of_other_shapes_are_refused_for_good(good: Path) -> None:
    config = json.loads((good / "config.json").read_text())
    (good / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ValueError, match="cannot be loaded"):
        build_model(ModelConfig(path=str(good)), 40, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ({"model_type": "nobody-made-this"}, "nobody-made-this"),
        ({"max_position_embeddings": 50}, "50 positions; set rollout.max_context_tokens = 96"),
    ],
)
def test_settings_of_a_model_that_cannot_be_run(good: Path, changes: dict[str, object], text: str) -> None:
    config = json.loads((good / "config.json").read_text())
    (good / "config.json").write_text(json.dumps(config | changes))
    assert text in report_on(good).problems[0]


def test_yarn_reaches_as_far_as_its_factor_says(good: Path) -> None:
    config = json.loads((good / "config.json").read_text())
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 50,
    }
    changes = {"max_position_embeddings": 50, "rope_parameters": rope}
    (good / "config.json").write_text(json.dumps(config | changes))
    assert report_on(good, 200).problems == ()
    assert "200 positions" in only_problem(report_on(good, 201))


def test_no_language_model_is_said_so(tmp_path: Path) -> None:
    T5Config(vocab_size=40, d_model=16, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    assert "no causal language model" in report_on(tmp_path).problems[0]


def test_what_no_engine_can_run_points_to_none(tmp_path: Path) -> None:
    make_model(CONFIGS["bloom"](), tmp_path)
    report = report_on(tmp_path)
    assert "BloomForCausalLM does not call transformers' attention interface" in only_problem(report)
    assert report.remedy == probe.NO_ENGINE


def with_sglang(directory: Path, monkeypatch: pytest.MonkeyPatch, served: set[str]) -> ModelReport:
    monkeypatch.setattr(probe, "served_architectures", lambda python: frozenset(served))
    rollout = RolloutConfig(engine="sglang", max_context_tokens=96)
    return examine(Config(model=ModelConfig(path=str(directory)), rollout=rollout))


def test_sglang_must_have_the_model_too(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_sglang(good, monkeypatch, {"Qwen3ForCausalLM"}).problems == ()
    report = with_sglang(good, monkeypatch, {"LlamaForCausalLM"})
    assert "SGLang has no model of its own for Qwen3ForCausalLM" in only_problem(report)
    assert report.remedy == probe.OTHER_ENGINE


def test_sglang_is_not_trusted_with_a_rope_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(CONFIGS["phi3, longrope"](), tmp_path)
    report = with_sglang(tmp_path, monkeypatch, {"Phi3ForCausalLM"})
    assert "at most 32" in only_problem(report)


def test_served_architectures_are_read_off_the_sources(tmp_path: Path) -> None:
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (models / "one.py").write_text("class A: pass\nEntryClass = A\n")
    (models / "more.py").write_text("EntryClass = [B, C]\n")
    (models / "none.py").write_text("import sys\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec python3 "$@"\n')
    python.chmod(0o755)
    assert served_architectures(str(python)) == {"A", "B", "C"}
    with pytest.raises(OSError, match="no SGLang"):
        served_architectures("/bin/false")


def test_the_page_has_the_table_of_what_was_tried() -> None:
    page = PAGE.read_text("utf-8")
    assert with_table(page, table(96)) == page, (
        "write it anew: python tests/workers/architecture/models_page.py"
    )


def test_every_configuration_is_a_configuration() -> None:
    assert all(isinstance(make(), PreTrainedConfig) for make in CONFIGS.values())
