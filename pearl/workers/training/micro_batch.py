"""A rank's share of an optimizer step: the packed sequences and what is known of each trained token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pearl.workers.training.aggregation import Aggregation, token_shares
from pearl.workers.training.batching import cut
from pearl.workers.training.flops import Flops
from pearl.workers.training.packing import Packed, pack
from pearl.workers.training.samples import TrainingSample


class MicroBatch:
    """``old_M`` and ``reference_M`` are filled in by iterations without gradient, where the loss needs them."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        places: Sequence[int],
        shares: Sequence[float],
        device: torch.device,
    ) -> None:
        """``places`` of the samples in the step's batch, ``shares`` of each of their tokens in its loss."""
        self.packed: Packed = pack([s.ids for s in samples], [s.positions for s in samples], device)
        self.rollout_M = _joined([s.logprobs for s in samples], np.float32).to(device)
        self.current_M = _joined([s.current for s in samples], np.bool_).to(device)
        counts = [len(s.positions) for s in samples]
        self.places_M = torch.from_numpy(np.repeat(np.array(places, np.int64), counts)).to(device)
        self.rows_M = torch.from_numpy(np.repeat(np.arange(len(samples)), counts)).to(device)
        self.shares_M = torch.from_numpy(np.repeat(np.array(shares, np.float32), counts)).to(device)
        self.advantages_M = torch.zeros_like(self.shares_M)
        self.old_M: torch.Tensor | None = None
        self.reference_M: torch.Tensor | None = None

    def set_advantages(self, advantages_S: npt.NDArray[np.float64]) -> None:
        """Set the advantages of all samples of the step."""
        self.advantages_M = torch.from_numpy(advantages_S).float().to(self.places_M.device)[self.places_M]


class Update:
    """One optimizer step: this rank's micro-batches, and the number of trained tokens over all ranks."""

    def __init__(self, micro_batches: list[MicroBatch], num_tokens: int) -> None:
        self.micro_batches = micro_batches
        self.num_tokens = num_tokens


def make_update(
    samples: Sequence[TrainingSample],
    chosen: Sequence[int],
    num_ranks: int,
    rank: int,
    tokens_per_micro_batch: int,
    flops: Flops,
    device: torch.device,
    aggregation: Aggregation = "token",
    constant: int = 1,
) -> Update:
    """Return the update of those of the step's samples that are ``chosen``.

    The same samples on every rank give plans that fit together; samples without a trained token are not run.
    """
    run = [index for index in chosen if samples[index].is_run]
    shares = token_shares(
        aggregation,
        [samples[index].num_trained for index in run],
        [samples[index].group for index in run],
        constant,
    )
    lengths = [samples[index].num_inputs for index in run]
    plan = cut(lengths, num_ranks, tokens_per_micro_batch, flops.of_sequence)
    micro_batches = [
        MicroBatch(
            [samples[run[place]] for place in places],
            [run[place] for place in places],
            [float(shares[place]) for place in places],
            device,
        )
        for places in plan[rank]
    ]
    return Update(micro_batches, sum(samples[index].num_trained for index in run))


def _joined(arrays: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype))
