"""What saves memory in a step changes nothing in its result: log-probs in chunks, activations computed again."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from training_worlds import CONFIG, MODEL, VOCABULARY, in_world, make_samples, with_training
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pearl.types.config import Config
from pearl.workers.architecture.attach import attach_attention
from pearl.workers.model import build_model
from pearl.workers.training.activations import checkpoint_activations, decoder_layers
from pearl.workers.training.batching import balance, cut
from pearl.workers.training.flops import Flops
from pearl.workers.training.fsdp import Policy, full_tensor
from pearl.workers.training.output_layer import OutputLayer
from pearl.workers.training.packing import NAME, Packed, pack
from pearl.workers.training.samples import unpack
from pearl.workers.training.scoring import Scores, forward, score

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def packed_samples(count: int = 9) -> Packed:
    samples = unpack(make_samples(count), VOCABULARY)
    return pack([sample.ids for sample in samples], [sample.positions for sample in samples], CPU)


def gradients(model: PreTrainedModel, scores: Scores) -> dict[str, torch.Tensor]:
    factors = torch.linspace(-1, 2, len(scores.logprobs_M))
    found = torch.autograd.grad((scores.logprobs_M * factors).sum(), list(model.parameters()))
    return {name: grad for (name, _), grad in zip(model.named_parameters(), found, strict=True)}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def build() -> PreTrainedModel:
    model = build_model(MODEL, VOCABULARY, 3)
    attach_attention(model, NAME, 64)
    return model


def test_the_output_layer_gives_what_all_logits_give() -> None:
    model, packed = build(), packed_samples()
    plain = score(model, packed, 0.7)
    expected = gradients(model, plain)
    found = OutputLayer(model, VOCABULARY).score(packed, 0.7)
    assert torch.allclose(found.logprobs_M, plain.logprobs_M, rtol=1e-5, atol=1e-6)
    assert torch.allclose(found.entropy_M, plain.entropy_M, rtol=1e-5, atol=1e-6)
    assert_close(gradients(model, found), expected)


def test_between_scorings_the_model_gives_its_logits() -> None:
    model, packed = build(), packed_samples()
    expected = forward(model, packed)
    layer = OutputLayer(model, VOCABULARY)
    layer.score(packed, 1.0)
    assert torch.equal(forward(model, packed), expected)


def test_logits_that_the_model_changes_afterwards_are_computed_in_full() -> None:
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0))
    model.train(False)
    attach_attention(model, NAME, 64)
    packed = packed_samples()
    expected = score(model, packed, 1.0)
    layer = OutputLayer(model, VOCABULARY)
    for _ in range(2):
        assert torch.equal(layer.score(packed, 1.0).logprobs_M, expected.logprobs_M)


def test_checkpointed_layers_have_the_same_gradients() -> None:
    model, packed = build(), packed_samples()
    expected = gradients(model, score(model, packed, 1.0))
    calls = []
    layers = decoder_layers(model)
    assert len(layers) == MODEL.num_layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        checkpoint_activations(layer)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        scores = score(model, packed, 1.0)
    assert_close(gradients(model, scores), expected)
    assert len(calls) == MODEL.num_layers  # what is computed again lies inside of the layers' hooks
    kept = len(saved)
    saved.clear()
    plain = build()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        score(plain, packed, 1.0)
    assert kept < len(saved) / 2


def untied(path: Path) -> Config:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    return msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(MODEL, path=str(path)))


def summed_gradients(config: Config, counts: list[int]) -> dict[str, torch.Tensor]:
    """Of one micro-batch a rank; ``counts`` are the samples of each, 0 for one that only takes part."""
    rank = torch.distributed.get_rank()
    policy = Policy(
        config.model, VOCABULARY, 0, CPU, activation_checkpointing=config.training.activation_checkpointing
    )
    samples = unpack(make_samples(sum(counts)), VOCABULARY)[sum(counts[:rank]) : sum(counts[: rank + 1])]
    packed = pack([sample.ids for sample in samples], [sample.positions for sample in samples], CPU)
    policy.backward(policy.score(packed, 1.0).logprobs_M.sum())
    for name, parameter in policy.parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
    return {
        name: full_tensor(parameter.grad)
        for name, parameter in policy.parameters.items()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("is_checkpointing", [True, False])
def test_untied_and_sharded_it_is_the_same(tmp_path: Path, is_checkpointing: bool) -> None:
    config = with_training(untied(tmp_path), activation_checkpointing=is_checkpointing)
    model = build_model(config.model, VOCABULARY, 0)
    attach_attention(model, NAME, 64)
    expected = torch.autograd.grad(
        score(model, packed_samples(5), 1.0).logprobs_M.sum(), list(model.parameters())
    )
    named = dict(zip(dict(model.named_parameters()), expected, strict=True))
    for counts in ([5], [3, 2], [5, 0]):
        for found in in_world(len(counts), summed_gradients, config, counts):
            assert_close(found, named)


def test_long_contexts_are_balanced_by_their_work() -> None:
    flops = Flops(per_token=1000, per_pair=1)
    lengths = [8000, *[1000] * 16]
    assert [len(share) for share in balance(lengths, 2)] == [5, 12]
    assert [len(share) for share in balance(lengths, 2, flops.of_sequence)] == [1, 16]  # 72e6 against 32e6
    plan = cut(lengths, 2, 8192, flops.of_sequence)
    assert sorted(index for rank in plan for batch in rank for index in batch) == list(range(17))


def test_work_counts_attention_by_the_square() -> None:
    model = build()
    flops = Flops.of(model)
    matrices = sum(parameter.numel() for parameter in model.parameters())
    assert flops.per_token == matrices  # tied: the embedding is the output layer too
    assert flops.of_sequence(10) == 10 * matrices + 100 * MODEL.num_layers * MODEL.num_heads * MODEL.head_dim
