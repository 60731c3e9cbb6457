"""What SGLang's ranks compare, on models that hold tensors fused, stacked, sharded, padded and replicated."""

import concurrent.futures
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from pearl.workers.rollout.sglang.pieces import Piece, checkpoint_pieces
from pearl.workers.rollout.sglang.settings import SERVER_PATH
from pearl.workers.weight_transfer.checksum import canonical_tensors, dtype_name
from pearl.workers.weight_transfer.snapshot_layout import image_bytes, lay_out

if str(SERVER_PATH) not in sys.path:
    sys.path.append(str(SERVER_PATH))
on_server: Any = importlib.import_module("pearl_on_server")
proof: Any = importlib.import_module("pearl_read_back")

NUM_RANKS, HIDDEN, HEADS, EXPERTS, VOCABULARY = 2, 8, 4, 3, 100
SHAPES = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "q_proj.weight": (HEADS * 2, HIDDEN),
    "k_proj.weight": (2, HIDDEN),  # one head of two rows, on every rank
    "v_proj.weight": (2, HIDDEN),
    "o_proj.weight": (HIDDEN, HEADS * 2),
    "norm.weight": (HIDDEN,),
    **{f"experts.{e}.{kind}_proj.weight": (4, HIDDEN) for e in range(EXPERTS) for kind in ("gate", "up")},
    **{f"experts.{e}.down_proj.weight": (HIDDEN, 4) for e in range(EXPERTS)},
}


class Rank(nn.Module):
    """A layer as one of two ranks holds it, and its loader, which knows the names of a checkpoint."""

    embed: nn.Parameter
    qkv_proj: nn.Parameter
    o_proj: nn.Parameter
    norm: nn.Parameter
    w13: nn.Parameter
    w2: nn.Parameter

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        for name, shape in {
            "embed": (64, HIDDEN),
            "qkv_proj": (HEADS + 4, HIDDEN),
            "o_proj": (HIDDEN, HEADS),
            "norm": (HIDDEN,),
            "w13": (EXPERTS, 4, HIDDEN),
            "w2": (EXPERTS, HIDDEN, 2),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, torch.nan)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        rank, stage = self.rank, slice(self.rank * len(tensor) // 2, (self.rank + 1) * len(tensor) // 2)
        qkv, w13, w2 = self.qkv_proj.data, self.w13.data, self.w2.data
        match name.split("."):
            case ["embed", _]:
                rows = tensor[rank * 64 : (rank + 1) * 64]
                self.embed.data[: len(rows)].copy_(rows)
                self.embed.data[len(rows) :].fill_(0)
            case ["q_proj", _]:
                qkv.narrow(0, 0, HEADS).copy_(tensor[stage])
            case ["k_proj", _]:
                qkv.narrow(0, HEADS, 2).copy_(tensor)
            case ["v_proj", _]:
                qkv.narrow(0, HEADS + 2, 2).copy_(tensor)
            case ["o_proj", _]:
                self.o_proj.data.copy_(tensor.narrow(1, rank * HEADS, HEADS))
            case ["norm", _]:
                self.norm.data.copy_(tensor)
            case ["experts", number, "gate_proj", _]:
                w13[int(number)][:2] = tensor[stage]
            case ["experts", number, "up_proj", _]:
                w13[int(number)][2:] = tensor[stage]
            case ["experts", number, "down_proj", _]:
                w2[int(number)].copy_(tensor.narrow(1, rank * 2, 2))


def given() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def loaded(rank: int, model: Rank | None = None) -> Rank:
    model = model or Rank(rank)
    model.load_weights(given())
    return model


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_what_was_loaded_is_proven_whatever_its_layout(rank: int) -> None:
    assert proof.read_back(loaded(rank), given()) == {"wrong": [], "unproven": [], "unused": []}


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("name", ["embed", "qkv_proj", "o_proj", "norm", "w13", "w2"])
def test_a_flipped_bit_in_any_parameter_of_any_rank_is_found(rank: int, name: str) -> None:
    model = loaded(rank)
    raw = getattr(model, name).data.view(-1).view(torch.int32)
    for place in (0, len(raw) // 2, len(raw) - 1):
        raw[place] ^= 1
        assert proof.read_back(model, given())["wrong"] == [name]
        raw[place] ^= 1
    assert proof.read_back(model, given())["wrong"] == []


def test_reading_back_changes_nothing() -> None:
    model = loaded(0)
    model.w2.data[1, 0, 0] += 1
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    proof.read_back(model, given())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())


def test_parameters_that_no_rule_covers_are_named() -> None:
    """As of a loader that knows experts by other names than it is given."""
    model = loaded(0)
    pieces = [(name, tensor) for name, tensor in given() if not name.startswith("experts")]
    fused = ("experts.gate_up_proj", torch.zeros(EXPERTS, 8, HIDDEN))
    said = proof.read_back(model, [*pieces, fused])
    assert said == {"wrong": [], "unproven": ["w13", "w2"], "unused": ["experts.gate_up_proj"]}


def test_a_parameter_that_is_covered_in_part_is_not_proven() -> None:
    model = loaded(0)
    pieces = [entry for entry in given() if entry[0] != "experts.1.up_proj.weight"]
    assert proof.read_back(model, pieces)["unproven"] == ["w13"]
    # A piece that comes again does not make up for one that is missing.
    again = next(entry for entry in pieces if entry[0] == "experts.1.gate_proj.weight")
    assert proof.read_back(model, [*pieces, again])["unproven"] == ["w13"]


class Overlapping(Rank):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm.weight":
            self.norm.data[:6].copy_(tensor[:6])
            self.norm.data[2:6].copy_(tensor[2:6])
        else:
            super().load_one(name, tensor)


def test_regions_that_overlap_do_not_hide_a_hole() -> None:
    model = loaded(0, Overlapping(0))
    assert proof.read_back(model, given())["unproven"] == ["norm"]


class Scattered(Rank):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm.weight":
            self.norm.data[torch.arange(HIDDEN)] = tensor
        else:
            super().load_one(name, tensor)


def test_a_write_that_cannot_be_compared_is_not_proven() -> None:
    (named,) = proof.read_back(loaded(0, Scattered(0)), given())["unproven"]
    assert named.startswith("norm (aten.index_put_")


class Threaded(Rank):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with concurrent.futures.ThreadPoolExecutor() as executor:
            futures = [executor.submit(self.load_one, *entry) for entry in weights]
            for future in concurrent.futures.as_completed(futures):
                future.result()


def test_loaders_that_write_in_threads_are_read_back_too() -> None:
    pool = concurrent.futures.ThreadPoolExecutor
    model = loaded(1, Threaded(1))
    assert proof.read_back(model, given()) == {"wrong": [], "unproven": [], "unused": []}
    model.o_proj.data[0, 0] += 1
    assert proof.read_back(model, given())["wrong"] == ["o_proj"]
    assert concurrent.futures.ThreadPoolExecutor is pool


class Sorted(Rank):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(sorted(weights, key=lambda entry: entry[0], reverse=True))


def test_loaders_that_take_all_tensors_first_use_them_all() -> None:
    assert proof.read_back(loaded(0, Sorted(0)), given())["unused"] == []


# Pieces of an image


def experts(tied: bool) -> Any:
    settings = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,  # type: ignore[call-arg]
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(2)
    return AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]


def on_meta(model: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config)  # type: ignore[no-untyped-call]


def as_order(model: Any, directory: Path, pieces: tuple[Piece, ...]) -> dict[str, Any]:
    tensors = canonical_tensors(model)
    specs = lay_out((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors)
    data = bytearray(image_bytes(specs))
    places = {}
    for spec, (_, tensor) in zip(specs, tensors, strict=True):
        data[spec.offset : spec.offset + spec.num_bytes] = tensor.contiguous().numpy().tobytes()
        places[spec.name] = spec.offset
    (directory / "image").write_bytes(data)
    rows = [(p.name, "float32", places[p.tensor] + 4 * p.offset, p.shape, p.strides) for p in pieces]
    return {"image": str(directory / "image"), "num_bytes": len(data), "pieces": rows}


@pytest.mark.parametrize("tied", [False, True])
def test_pieces_are_what_transformers_saves(tmp_path: Path, tied: bool) -> None:
    model = experts(tied)
    order = as_order(model, tmp_path, checkpoint_pieces(on_meta(model)))
    found = dict(on_server._pieces(order))
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() <= found.keys()
    assert found.keys() - saved.keys() == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in found


def test_a_dense_model_has_its_own_names() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            Qwen3Config(vocab_size=32, hidden_size=16, num_hidden_layers=1)
        )
    pieces = checkpoint_pieces(model)
    assert {piece.name for piece in pieces} == model.state_dict().keys()
    assert all(piece.offset == 0 for piece in pieces)
