"""A rank's share of an optimizer step: the packed sequences and what is known of each trained token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pearl.workers.training.batching import cut
from pearl.workers.training.flops import Flops
from pearl.workers.training.packing import Packed, pack
from pearl.workers.training.samples import TrainingSample


class MicroBatch:
    """``old_M`` and ``reference_M`` are filled in by iterations without gradient, where the loss needs them."""

    def __init__(
        self, samples: Sequence[TrainingSample], advantages: Sequence[float], device: torch.device
    ) -> None:
        self.packed: Packed = pack([s.ids for s in samples], [s.positions for s in samples], device)
        self.rollout_M = _joined([s.logprobs for s in samples], np.float32).to(device)
        self.current_M = _joined([s.current for s in samples], np.bool_).to(device)
        spread = [np.full(len(s.positions), a) for s, a in zip(samples, advantages, strict=True)]
        self.advantages_M = _joined(spread, np.float32).to(device)
        self.old_M: torch.Tensor | None = None
        self.reference_M: torch.Tensor | None = None


class Update:
    """One optimizer step: this rank's micro-batches, and the number of trained tokens over all ranks."""

    def __init__(self, micro_batches: list[MicroBatch], num_tokens: int) -> None:
        self.micro_batches = micro_batches
        self.num_tokens = num_tokens


def make_update(
    samples: Sequence[TrainingSample],
    advantages: npt.NDArray[np.float64],
    num_ranks: int,
    rank: int,
    tokens_per_micro_batch: int,
    flops: Flops,
    device: torch.device,
) -> Update:
    """The same samples on every rank give plans that fit together; samples without a trained token are not run."""
    run = [index for index, sample in enumerate(samples) if sample.is_run]
    lengths = [samples[index].num_inputs for index in run]
    plan = cut(lengths, num_ranks, tokens_per_micro_batch, flops.of_sequence)
    micro_batches = [
        MicroBatch(
            [samples[run[place]] for place in chosen],
            [float(advantages[run[place]]) for place in chosen],
            device,
        )
        for chosen in plan[rank]
    ]
    return Update(micro_batches, sum(samples[index].num_trained for index in run))


def _joined(arrays: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype))
