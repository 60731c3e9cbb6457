"""The packed forward against the model's own on one sequence at a time."""

import msgspec
import numpy as np
import pytest
import torch
from training_worlds import MODEL, VOCABULARY, make_sample, make_samples
from transformers import PreTrainedModel

from pearl.types.config import ModelConfig
from pearl.workers.architecture.attach import ATTRIBUTE, attach_attention
from pearl.workers.architecture.masks import Mask
from pearl.workers.model import build_model
from pearl.workers.training.packing import NAME, pack, packed_attention
from pearl.workers.training.samples import TrainingSample, unpack
from pearl.workers.training.scoring import Scores, score

CPU = torch.device("cpu")


def build(attention: str, config: ModelConfig = MODEL) -> PreTrainedModel:
    model = build_model(config, VOCABULARY, seed=3)
    if attention == NAME:
        attach_attention(model, NAME, max_context_tokens=64)
    else:
        model.set_attn_implementation(attention)
    return model


def score_all(model: PreTrainedModel, samples: list[TrainingSample], temperature: float) -> Scores:
    packed = pack([sample.ids for sample in samples], [sample.positions for sample in samples], CPU)
    return score(model, packed, temperature)


def one_by_one(model: PreTrainedModel, samples: list[TrainingSample], temperature: float) -> torch.Tensor:
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.ids.astype(np.int64))
        logprobs = (model(input_ids=ids[None], use_cache=False).logits[0].double() / temperature).log_softmax(
            -1
        )
        found += [logprobs[position - 1, ids[position]] for position in sample.positions]
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.scenario("LP-01")
def test_log_probs_are_those_of_the_plain_model(temperature: float) -> None:
    samples = unpack(make_samples(9), VOCABULARY)
    scores = score_all(build(NAME), samples, temperature)
    expected = one_by_one(build("sdpa"), samples, temperature)
    assert (scores.logprobs_M - expected).abs().max().item() < 3e-6


def test_sequences_of_one_length_are_not_padded() -> None:
    samples = unpack(
        [make_sample(t, 0, 0.0, [t, 3, 4], [False, False, True], [0, 0, -1]) for t in range(4)], VOCABULARY
    )
    packed = pack([sample.ids for sample in samples], [sample.positions for sample in samples], CPU)
    assert packed.spread.sources is None
    expected = one_by_one(build("sdpa"), samples, 1.0)
    assert (score(build(NAME), packed, 1.0).logprobs_M - expected).abs().max().item() < 3e-6


def test_gradient_is_that_of_the_plain_model() -> None:
    samples = unpack(make_samples(9), VOCABULARY)
    packed_model, plain_model = build(NAME), build("sdpa")
    torch.autograd.backward(score_all(packed_model, samples, 1.0).logprobs_M.mean())
    torch.autograd.backward(one_by_one(plain_model, samples, 1.0).mean())
    for ours, theirs in zip(packed_model.parameters(), plain_model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max().item() < 1e-6


def test_no_sequence_runs_and_has_zero_gradient() -> None:
    model = build(NAME)
    scores = score(model, pack([], [], CPU), 1.0)
    assert len(scores.logprobs_M) == 0
    torch.autograd.backward(scores.logprobs_M.sum())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.scenario("TK-04")
def test_gradient_reaches_no_logit_of_a_tool_token() -> None:
    mask = [False] * 3 + [True] * 4 + [False] * 3 + [True] * 5
    [sample] = unpack([make_sample(0, 0, 1.0, list(range(15)), mask, [0.0] * 15)], VOCABULARY)
    model = build(NAME)
    seen: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, into: object, out: tuple[torch.Tensor, ...]) -> None:
        seen.append(out[0][0])

    model.get_submodule("lm_head").register_full_backward_hook(keep)
    torch.autograd.backward(score_all(model, [sample], 1.0).logprobs_M.sum())
    # Logits exist only for the nine generated tokens, each pulled up at its own id.
    assert seen[0].shape[0] == 9
    assert (seen[0] > 0).nonzero()[:, 1].tolist() == [3, 4, 5, 6, 10, 11, 12, 13, 14]


def test_bfloat16_is_scored_in_float32() -> None:
    model = build(NAME, msgspec.structs.replace(MODEL, dtype="bfloat16"))
    scores = score_all(model, unpack(make_samples(3), VOCABULARY), 1.0)
    assert scores.logprobs_M.dtype == torch.float32


def test_sliding_window_hides_what_is_further_back() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 4, generator=generator) for _ in range(3))
    ids = [np.zeros(n + 1, np.int32) for n in (3, 6)]
    spread = pack(ids, [np.array([n]) for n in (3, 6)], CPU).spread
    module = torch.nn.Module()
    setattr(module, ATTRIBUTE, Mask("sliding", 2))
    output, _ = packed_attention(module, query, key, value, None, scaling=0.5, spread=spread)
    for place in range(9):
        first = max(0 if place < 3 else 3, place - 1)
        weights = (0.5 * query[0, :, place, None] @ key[0, :, first : place + 1].mT).softmax(-1)
        expected = (weights @ value[0, :, first : place + 1])[:, 0]
        assert torch.allclose(output[0, place], expected, atol=1e-6)


def test_attention_with_a_feature_we_lack_is_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    spread = pack([np.zeros(4, np.int32)], [np.array([3])], CPU).spread
    with pytest.raises(ValueError, match="position_bias"):
        packed_attention(torch.nn.Module(), states, states, states, None, spread=spread, position_bias=states)


def test_rows_beyond_the_vocabulary_have_no_probability() -> None:
    model = build(NAME)
    samples = unpack(make_samples(5), VOCABULARY)
    packed = pack([sample.ids for sample in samples], [sample.positions for sample in samples], CPU)
    whole = score(model, packed, 1.0)
    with torch.no_grad():
        model.resize_token_embeddings(VOCABULARY + 24)
    padded = score(model, packed, 1.0, VOCABULARY)
    assert torch.equal(padded.logprobs_M, whole.logprobs_M)
    assert torch.equal(padded.entropy_M, whole.entropy_M)
