"""What a host says that it computes with, and why one with something else is not let in."""

import os
from pathlib import Path

import msgspec
import pytest

import pearl
from pearl.runtime.installation import differences, installation, model_digest, sources_digest
from pearl.runtime.peer_table import PeerTable
from pearl.types.config import Config, ModelConfig, RolloutConfig, SglangConfig
from pearl.types.messages.control import Hello, Installation, PeerKind

OURS = Installation("aaa", {"python": "3.11", "torch": "2.13.0", "sglang": "0.5.23"}, "mmm")


def test_it_names_python_torch_transformers_and_the_sources() -> None:
    found = installation()
    assert found.versions.keys() == {"python", "torch", "transformers"}
    assert all(found.versions.values())
    assert len(found.sources) == 16
    assert found.model == ""
    assert differences(found, installation()) == ""


def test_the_job_adds_its_engine_and_its_model(tmp_path: Path) -> None:
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "sglang-9.9.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = Config(
        model=ModelConfig(path=str(model)),
        rollout=RolloutConfig(engine="sglang"),
        sglang=SglangConfig(python=str(tmp_path / "venv" / "bin" / "python")),
    )
    found = installation(config)
    assert found.versions["sglang"] == "9.9"
    assert found.model == model_digest(str(model))
    nowhere = msgspec.structs.replace(config, sglang=SglangConfig(python="/nowhere/bin/python"))
    assert installation(nowhere).versions["sglang"] == ""


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (None, "it does not say what it runs"),
        (Installation("bbb", OURS.versions, "mmm"), "PEARL's sources: bbb there, aaa here"),
        (Installation("aaa", OURS.versions | {"torch": "2.12.0"}), "torch: 2.12.0 there, 2.13.0 here"),
        (Installation("aaa", OURS.versions | {"torch": ""}), "torch: not installed there, 2.13.0 here"),
        (Installation("aaa", OURS.versions, "nnn"), "the model's files: nnn there, mmm here"),
        (
            Installation("aaa", {"python": "3.11", "torch": "2.13.0"}),
            "",
        ),  # an agent knows no engine and no model
    ],
)
def test_a_difference_is_told_with_both_values(theirs: Installation | None, said: str) -> None:
    assert differences(OURS, theirs).startswith(said)
    assert bool(differences(OURS, theirs)) == bool(said)


@pytest.mark.parametrize(
    ("kind", "is_asked"), [("agent", True), ("rollout", True), ("training", True), ("admin", False)]
)
def test_agents_and_workers_are_let_in_only_with_the_same(kind: PeerKind, is_asked: bool) -> None:
    def hello(theirs: Installation | None) -> Hello:
        return Hello(kind, 0, 1, "there", 1, "run", installation=theirs)

    table = PeerTable("run", OURS)
    changed = msgspec.structs.replace(OURS, sources="bbb")
    assert table.objection(hello(OURS)) == ""
    assert ("bbb there, aaa here" in table.objection(hello(changed))) == is_asked
    assert PeerTable("run").objection(hello(changed)) == "", "nobody asks"


def test_one_changed_line_of_the_sources_changes_their_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("__init__.py", "sub/sampler.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(pearl, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for content in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (tmp_path / "sub/sampler.py").write_text(content)
        sources_digest.cache_clear()
        digests.append(sources_digest())
    sources_digest.cache_clear()
    assert digests[0] == digests[2] != digests[1]


def digest_of(directory: Path) -> str:
    model_digest.cache_clear()
    return model_digest(str(directory))


def test_files_of_a_model_are_told_apart_by_name_size_header_and_samples(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    size = 9 << 20
    weights.write_bytes(bytes(size))
    (tmp_path / "config.json").write_text('{"rope_theta": 1.0}')
    first = digest_of(tmp_path)
    (tmp_path / "README.md").write_text("of no matter")
    assert digest_of(tmp_path) == first

    (tmp_path / "config.json").write_text('{"rope_theta": 2.0}')
    assert digest_of(tmp_path) != first
    (tmp_path / "config.json").write_text('{"rope_theta": 1.0}')
    assert digest_of(tmp_path) == first

    for changed in (100, size - 1):  # in the header, and at the end of the data
        with weights.open("r+b") as file:
            file.seek(changed, os.SEEK_SET)
            file.write(b"x")
        assert digest_of(tmp_path) != first
        weights.write_bytes(bytes(size))
    weights.write_bytes(bytes(size + 1))
    assert digest_of(tmp_path) != first


def test_a_model_that_is_not_there_is_none() -> None:
    assert model_digest("/nowhere") == "none"
    assert model_digest("tiny-qwen3") == "none"
