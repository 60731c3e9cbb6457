"""Log-probs and entropy straight from hidden states, without ever holding the logits of all tokens and ids.

The output layer's product, the logsumexp and the entropy are taken over a block of tokens and ids at a time, and the
blocks are computed again in the backward pass. Letters: M tokens, D hidden size, V ids, B the tokens and C the ids of
a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

TOKENS_PER_CHUNK = 1024
IDS_PER_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Chunking:
    """``num_ids``: rows of the output layer that are real ids; the others are padding and get no probability."""

    num_ids: int
    temperature: float = 1.0  # the logits are divided by it; 0, the greedy one, counts as 1
    tokens: int = TOKENS_PER_CHUNK
    ids: int = IDS_PER_CHUNK
    has_entropy_gradient: bool = False

    @property
    def scale(self) -> float:
        return 1 / self.temperature if self.temperature else 1.0

    def token_blocks(self, num_tokens: int) -> Iterator[slice]:
        return (slice(i, min(i + self.tokens, num_tokens)) for i in range(0, num_tokens, self.tokens))

    def id_blocks(self) -> Iterator[slice]:
        return (slice(i, min(i + self.ids, self.num_ids)) for i in range(0, self.num_ids, self.ids))


def chunked_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_M: torch.Tensor,
    chunking: Chunking,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy in nats), both float32.

    The entropy has a gradient only where ``chunking`` asks for it.
    """
    found = _ChunkedLogprobs.apply(hidden_MD, weight_VD, bias_V, targets_M, chunking)  # type: ignore[no-untyped-call]
    return cast(tuple[torch.Tensor, torch.Tensor], found)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_M: torch.Tensor,
        chunking: Chunking,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = len(hidden_MD)
        logsumexp_M = hidden_MD.new_empty(num_tokens, dtype=torch.float32)
        entropy_M = torch.empty_like(logsumexp_M)
        chosen_M = torch.empty_like(logsumexp_M)
        for tokens in chunking.token_blocks(num_tokens):
            sums = _OnlineSums(tokens.stop - tokens.start, hidden_MD.device)
            for ids in chunking.id_blocks():
                logits_BC = _logits(hidden_MD[tokens], weight_VD, bias_V, ids, chunking.scale)
                _take_chosen(chosen_M[tokens], logits_BC, targets_M[tokens], ids)
                sums.add(logits_BC)
            logsumexp_M[tokens] = sums.logsumexp_B
            entropy_M[tokens] = sums.entropy_B
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, targets_M, logsumexp_M, entropy_M)
        ctx.chunking = chunking
        ctx.set_materialize_grads(False)
        if not chunking.has_entropy_gradient:
            ctx.mark_non_differentiable(entropy_M)
        return chosen_M - logsumexp_M, entropy_M

    @staticmethod
    def backward(
        ctx: Any, logprobs_grad_M: torch.Tensor | None, entropy_grad_M: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, targets_M, logsumexp_M, entropy_M = ctx.saved_tensors
        chunking: Chunking = ctx.chunking
        needs_weight = ctx.needs_input_grad[1]
        if not chunking.has_entropy_gradient:
            entropy_grad_M = None
        if logprobs_grad_M is None:
            logprobs_grad_M = torch.zeros_like(logsumexp_M)
        # Sums over blocks are float32 whatever the layer's dtype; they are rounded once, at the end.
        hidden_grad_MD = torch.zeros_like(hidden_MD, dtype=torch.float32)
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None else None
        for tokens in chunking.token_blocks(len(hidden_MD)):
            hidden_BD = hidden_MD[tokens]
            for ids in chunking.id_blocks():
                logits_BC = _logits(hidden_BD, weight_VD, bias_V, ids, chunking.scale)
                grad_BC = _logits_grad(
                    logits_BC.sub_(logsumexp_M[tokens, None]),
                    logprobs_grad_M[tokens],
                    entropy_grad_M[tokens] if entropy_grad_M is not None else None,
                    entropy_M[tokens],
                )
                _add_chosen(grad_BC, logprobs_grad_M[tokens], targets_M[tokens], ids)
                grad_BC.mul_(chunking.scale)
                if bias_grad_V is not None:
                    bias_grad_V[ids] += grad_BC.sum(0)
                grad_BC = grad_BC.to(weight_VD.dtype)
                _add_product(hidden_grad_MD[tokens], grad_BC, weight_VD[ids])
                if weight_grad_VD is not None:
                    _add_product(weight_grad_VD[ids], grad_BC.T, hidden_BD)
        return (
            hidden_grad_MD.to(hidden_MD.dtype),
            weight_grad_VD.to(weight_VD.dtype) if weight_grad_VD is not None else None,
            bias_grad_V.to(bias_V.dtype) if bias_grad_V is not None else None,
            None,
            None,
        )


class _OnlineSums:
    """Logsumexp and entropy of logits that come in blocks of ids, kept relative to the largest so far."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._largest_B = torch.full((num_tokens,), -torch.inf, device=device)
        self._weights_B = torch.zeros(num_tokens, device=device)  # sum of exp(x - largest)
        self._weighted_B = torch.zeros(num_tokens, device=device)  # sum of exp(x - largest) * (x - largest)

    def add(self, logits_BC: torch.Tensor) -> None:
        """Changes ``logits_BC``."""
        largest_B = torch.maximum(self._largest_B, logits_BC.amax(-1))
        shift_B = self._largest_B - largest_B
        factor_B = shift_B.exp()
        moved_B = torch.where(factor_B > 0, shift_B, 0.0)  # -inf before the first block
        shifted_BC = logits_BC.sub_(largest_B[:, None])
        weights_BC = shifted_BC.exp()
        self._weighted_B = factor_B * (self._weighted_B + moved_B * self._weights_B)
        self._weighted_B += torch.linalg.vecdot(weights_BC, shifted_BC)
        self._weights_B = factor_B * self._weights_B + weights_BC.sum(-1)
        self._largest_B = largest_B

    @property
    def logsumexp_B(self) -> torch.Tensor:
        return self._largest_B + self._weights_B.log()

    @property
    def entropy_B(self) -> torch.Tensor:
        return self._weights_B.log() - self._weighted_B / self._weights_B


def _logits(
    hidden_BD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    ids: slice,
    scale: float,
) -> torch.Tensor:
    """A block of tempered logits in float32, fresh memory; the product has the layer's own dtype, as the engine's."""
    bias_C = bias_V[ids] if bias_V is not None else None
    logits_BC = torch.nn.functional.linear(hidden_BD, weight_VD[ids], bias_C).float()
    return logits_BC.mul_(scale) if scale != 1 else logits_BC


def _logits_grad(
    logprobs_BC: torch.Tensor,
    logprobs_grad_B: torch.Tensor,
    entropy_grad_B: torch.Tensor | None,
    entropy_B: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the tempered logits without the chosen id's own term; ``logprobs_BC`` may be
    overwritten."""
    if entropy_grad_B is None:
        return logprobs_BC.exp_().mul_(-logprobs_grad_B[:, None])
    probabilities_BC = logprobs_BC.exp()
    factor_BC = (
        (logprobs_BC + entropy_B[:, None]).mul_(entropy_grad_B[:, None]).add_(logprobs_grad_B[:, None])
    )
    return probabilities_BC.mul_(factor_BC).neg_()


def _inside(targets_B: torch.Tensor, ids: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets lie in the block, and their column there; column 0 for the others."""
    is_inside_B = (targets_B >= ids.start) & (targets_B < ids.stop)
    return is_inside_B, torch.where(is_inside_B, targets_B - ids.start, 0)


def _take_chosen(
    chosen_B: torch.Tensor, logits_BC: torch.Tensor, targets_B: torch.Tensor, ids: slice
) -> None:
    is_inside_B, columns_B = _inside(targets_B, ids)
    taken_B = logits_BC.gather(-1, columns_B[:, None])[:, 0]
    chosen_B.copy_(torch.where(is_inside_B, taken_B, chosen_B))


def _add_chosen(grad_BC: torch.Tensor, values_B: torch.Tensor, targets_B: torch.Tensor, ids: slice) -> None:
    is_inside_B, columns_B = _inside(targets_B, ids)
    grad_BC.scatter_add_(-1, columns_B[:, None], torch.where(is_inside_B, values_B, 0.0)[:, None])


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    else:
        into += left @ right
