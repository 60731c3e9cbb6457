"""Chunked log-probs and entropy against the plain formula over all logits."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from pearl.workers.training.chunked_logprobs import Chunking, chunked_logprobs

TOKENS, HIDDEN, IDS = 11, 6, 37
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(TOKENS, HIDDEN, generator=generator) * scale).to(dtype).requires_grad_()
    weight = torch.randn(IDS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(IDS, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, 30, (TOKENS,), generator=generator)


def plain(given: Inputs, chunking: Chunking) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, weight, bias, targets = given
    logits = functional.linear(hidden, weight, bias).double()[:, : chunking.num_ids] * chunking.scale
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def chunked(given: Inputs, chunking: Chunking) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, weight, bias, targets = given
    return chunked_logprobs(hidden, weight, bias, targets, chunking)


def gradients(
    given: Inputs,
    chunking: Chunking,
    work: Callable[[Inputs, Chunking], tuple[torch.Tensor, torch.Tensor]],
) -> list[torch.Tensor]:
    logprobs, entropy = work(given, chunking)
    factors = torch.linspace(-1, 2, TOKENS)
    loss = (logprobs * factors).sum()
    if chunking.has_entropy_gradient:
        loss = loss + (entropy * factors.flip(0)).sum()
    return list(torch.autograd.grad(loss, given[:3]))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = found.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


@pytest.mark.parametrize("blocks", [(4, 10), (1, 1), (100, 100), (11, 37), (5, 36)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("num_ids", [IDS, 30])
@pytest.mark.parametrize("has_entropy_gradient", [False, True])
def test_chunks_equal_the_plain_formula(
    blocks: tuple[int, int], temperature: float, num_ids: int, has_entropy_gradient: bool
) -> None:
    given = inputs()
    chunking = Chunking(num_ids, temperature, *blocks, has_entropy_gradient)
    for found, expected in zip(chunked(given, chunking), plain(given, chunking), strict=True):
        assert relative(found, expected) < 1e-5
    found_all, expected_all = (gradients(given, chunking, work) for work in (chunked, plain))
    for found, expected in zip(found_all, expected_all, strict=True):
        assert relative(found, expected) < 1e-5


def test_padded_rows_have_no_probability_and_no_gradient() -> None:
    given = inputs()
    _, weight_grad, bias_grad = gradients(given, Chunking(30, tokens=4, ids=8), chunked)
    assert not weight_grad[30:].any()
    assert not bias_grad[30:].any()
    assert weight_grad[:30].any(-1).all()


def test_logits_far_apart_stay_exact() -> None:
    hidden = torch.tensor([[200.0], [-200.0]])
    weight = torch.tensor([[1.0], [0.0], [-1.0], [0.999]])
    logprobs, entropy = chunked_logprobs(hidden, weight, None, torch.tensor([3, 0]), Chunking(4, ids=1))
    assert logprobs.tolist() == pytest.approx([-0.2 - 0.598139, -400.0], rel=1e-4)
    assert entropy[1].item() == 0.0
    assert entropy[0].item() == pytest.approx(0.688139, rel=1e-4)


def test_no_token_gives_zero_gradients() -> None:
    _, weight, bias, _ = inputs()
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    logprobs, entropy = chunked_logprobs(
        hidden, weight, bias, torch.zeros(0, dtype=torch.long), Chunking(IDS)
    )
    assert (len(logprobs), len(entropy)) == (0, 0)
    found = torch.autograd.grad(logprobs.sum(), (hidden, weight, bias))
    assert [tuple(gradient.shape) for gradient in found] == [(0, HIDDEN), (IDS, HIDDEN), (IDS,)]
    assert not any(gradient.any() for gradient in found)


def test_bfloat16_sums_are_float32() -> None:
    given = inputs(dtype=torch.bfloat16)
    found_all = gradients(given, Chunking(IDS, tokens=3, ids=5), chunked)
    exact: Inputs = tuple(  # type: ignore[assignment]
        tensor.detach().float().requires_grad_() if tensor.is_floating_point() else tensor for tensor in given
    )
    for found, expected in zip(found_all, gradients(exact, Chunking(IDS), plain), strict=True):
        assert found.dtype == torch.bfloat16
        assert relative(found, expected) < 0.01


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, bias, targets = inputs()
    logprobs, entropy = chunked_logprobs(hidden, weight.detach(), None, targets, Chunking(IDS))
    assert not entropy.requires_grad
    [found] = torch.autograd.grad(logprobs.sum(), [hidden])
    expected = plain((hidden, weight, torch.zeros_like(bias), targets), Chunking(IDS))[0].sum()
    assert relative(found, torch.autograd.grad(expected, [hidden])[0]) < 1e-5
