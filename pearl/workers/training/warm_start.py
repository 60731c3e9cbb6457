"""The supervised start: weighted cross-entropy on an expert's demonstrations, with an optimizer of its own."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pearl.types.config import WarmStartConfig
from pearl.types.messages.training import Demonstration
from pearl.workers.training.batching import cut
from pearl.workers.training.fsdp import Policy, apply_update, make_optimizer
from pearl.workers.training.learning_rate import warmup
from pearl.workers.training.packing import pack

BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


class PackedDemonstration:
    """A demonstration, unpacked. ``weights`` are those of ``positions``, none of them 0."""

    def __init__(self, demonstration: Demonstration, vocabulary_size: int) -> None:
        self.ids = np.frombuffer(demonstration.ids, "<i4")
        weights = np.frombuffer(demonstration.weights, "<f4")
        if len(weights) != len(self.ids) or not np.isfinite(weights).all():
            raise ValueError(
                f"a demonstration has {len(self.ids)} ids and {len(weights)} weights, "
                "or weights that are not finite: one finite weight a position"
            )
        if len(self.ids) and (self.ids.min() < 0 or self.ids.max() >= vocabulary_size):
            raise ValueError(f"a demonstration has ids outside the model's {vocabulary_size}")
        positions = np.flatnonzero(weights)
        self.positions = positions[positions > 0]  # nothing predicts the first token
        self.weights = weights[self.positions]

    @property
    def num_inputs(self) -> int:
        return int(self.positions[-1]) if len(self.positions) else 0


def warm_start(
    policy: Policy,
    demonstrations: Sequence[Demonstration],
    config: WarmStartConfig,
    tokens_per_micro_batch: int,
    seed: int,
    on_micro_batch: Callable[[], None],
) -> dict[str, float]:
    """Train for ``config.num_steps`` batches; all ranks call it with the same demonstrations -> metrics.

    Raises:
        ValueError: there is nothing to learn from, or a demonstration is malformed.
    """
    lessons = [PackedDemonstration(demonstration, policy.vocabulary_size) for demonstration in demonstrations]
    lessons = [lesson for lesson in lessons if len(lesson.positions)]
    if not lessons:
        raise ValueError(
            f"warm_start.num_steps = {config.num_steps}, but no demonstration with a trained token came: "
            "set it to 0 for an environment without an expert"
        )
    optimizer = make_optimizer(policy, config.learning_rate, BETAS, 0.0)
    losses = []
    norm = 0.0
    for step, batch in enumerate(batches(len(lessons), config.batch_size, config.num_steps, seed)):
        losses.append(
            _accumulate(policy, [lessons[index] for index in batch], tokens_per_micro_batch, on_micro_batch)
        )
        rate = config.learning_rate * warmup(step, config.warmup_steps)
        norm, _ = apply_update(policy, optimizer, rate, MAX_GRAD_NORM)
    first_last = {"warm_start_loss_first": losses[0], "warm_start_loss_last": losses[-1]}
    return {**first_last, "warm_start_grad_norm": norm, "warm_start_steps": float(config.num_steps)}


def batches(count: int, batch_size: int, num_steps: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of each step's batch: epochs of all of them, each in an order of its own from (seed, epoch)."""
    order = np.zeros(0, np.int64)
    epoch = 0
    for _ in range(num_steps):
        while len(order) < min(batch_size, count):
            order = np.concatenate((order, np.random.default_rng([abs(seed), epoch]).permutation(count)))
            epoch += 1
        yield order[:batch_size]
        order = order[batch_size:]


def _accumulate(
    policy: Policy,
    lessons: Sequence[PackedDemonstration],
    tokens_per_micro_batch: int,
    on_micro_batch: Callable[[], None],
) -> float:
    """Gradients of the weighted mean over the whole batch -> that mean."""
    total = float(sum(np.abs(lesson.weights).sum(dtype=np.float64) for lesson in lessons))
    lengths = [lesson.num_inputs for lesson in lessons]
    plan = cut(lengths, policy.num_ranks, tokens_per_micro_batch, policy.flops.of_sequence)
    summed = torch.zeros(1, dtype=torch.float64)
    for chosen in plan[dist.get_rank()]:
        part = [lessons[index] for index in chosen]
        packed = pack([lesson.ids for lesson in part], [lesson.positions for lesson in part], policy.device)
        weights = np.concatenate([lesson.weights for lesson in part]) if part else np.zeros(0, np.float32)
        logprobs_M = policy.score(packed, temperature=1.0).logprobs_M
        loss = -(torch.from_numpy(weights.copy()).to(policy.device) * logprobs_M).sum() / total
        policy.backward(loss)
        summed += loss.detach().double().cpu()
        on_micro_batch()
    dist.all_reduce(summed)
    return summed.item()
