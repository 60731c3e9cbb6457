"""Counter-based sampling: the draw at position i of a trajectory depends on (seed, i) and the logits alone.

So the same weights give the same tokens on any worker, in any batch and after any interruption. Shapes: N requests,
V token ids.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pearl.runtime.counter_rng import counter_bits


def key_uniform(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1) for each (``splitmix64`` of the seed, position)."""
    bits = counter_bits(keys, positions)
    uniform: npt.NDArray[np.float64] = (bits >> np.uint64(11)) * np.float64(2.0**-53)
    return uniform


@dataclass(frozen=True, slots=True)
class Sampled:
    ids: list[int]
    logprobs: list[float]
    finite: list[bool]  # False: this row's logits hold NaN or infinity, its id and log-prob mean nothing


def sample(
    logits_NV: torch.Tensor, temperatures: npt.NDArray[np.float64], uniforms: npt.NDArray[np.float64]
) -> Sampled:
    """One id a row: by inverse transform of softmax(logits / temperature), or the largest at temperature 0."""
    greedy = temperatures == 0.0
    scale = torch.from_numpy(np.where(greedy, 1.0, temperatures)).to(logits_NV.device)
    scaled = logits_NV.double() / scale[:, None]
    # One bad entry makes the row's sum NaN or infinite; doubles cannot overflow on finite float logits.
    finite = torch.isfinite(scaled.sum(-1))
    logprobs_NV = scaled.log_softmax(-1)
    ids = logprobs_NV.argmax(-1) if greedy.all() else _draw(logprobs_NV, uniforms, greedy)
    logprobs = logprobs_NV.gather(1, ids[:, None])[:, 0]
    # One transfer for the three results; ids are exact in doubles.
    packed = torch.stack((ids.double(), logprobs, finite.double())).tolist()
    return Sampled([int(i) for i in packed[0]], packed[1], [flag == 1.0 for flag in packed[2]])


def _draw(
    logprobs_NV: torch.Tensor, uniforms: npt.NDArray[np.float64], greedy: npt.NDArray[np.bool_]
) -> torch.Tensor:
    cumulative = logprobs_NV.exp().cumsum(-1)
    target = torch.from_numpy(uniforms).to(cumulative.device)[:, None] * cumulative[:, -1:]
    # right=True passes over ids of probability zero; the clamp covers a product rounded up to the total.
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=cumulative.shape[1] - 1)
    if greedy.any():
        ids = torch.where(torch.from_numpy(greedy).to(ids.device), logprobs_NV.argmax(-1), ids)
    return ids
