"""What a training step costs in memory and time beside the plain computation, on a model of SmolLM2-135M's shape.

    OMP_NUM_THREADS=1 python benchmarks/training_step.py [--tokens N] [--time-tokens N] [--rounds N]

Plain means: all logits at once, all activations kept. Prints the peak resident memory of whole steps (two, with
optimizer and snapshot) in a process of their own at ``--tokens`` a micro-batch, then the largest relative difference
of gradients and the ratio of times at ``--time-tokens``, the median of paired rounds in turn (a busy machine slows
both sides of a pair). Exit status 1 when memory is above 4.5 GB, gradients differ by more than 1e-5 or the ratio is
above 4 / 3.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pearl.types.config import Config, DataConfig, ModelConfig, RolloutConfig, TrainingConfig, WarmStartConfig
from pearl.types.messages.training import Sample
from pearl.workers.allocator import return_large_blocks
from pearl.workers.architecture.attach import attach_attention
from pearl.workers.model import build_model, use_one_thread
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.fsdp import Policy
from pearl.workers.training.packing import NAME, Packed, pack
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.scoring import score
from pearl.workers.training.trainer import Trainer
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

IDS = 49152
CPU = torch.device("cpu")
MEMORY_LIMIT = 4.5e9
TIME_LIMIT = 4 / 3
GRADIENT_LIMIT = 1e-5


def config(tokens: int) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=30,
            hidden_size=576,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            ffn_size=1536,
            initializer_range=0.02,
            device="cpu",
        ),
        data=DataConfig(batch_size=4, group_size=4),
        rollout=RolloutConfig(max_context_tokens=tokens),
        training=TrainingConfig(tokens_per_micro_batch=tokens),
        warm_start=WarmStartConfig(num_steps=0),
    )


def batch(tokens: int) -> tuple[Sample, ...]:
    """Four samples that fill one micro-batch, nearly all of their tokens generated."""
    random = np.random.default_rng(0)
    length = tokens // 4 + 1
    mask = np.ones(length, np.uint8)
    mask[:8] = 0
    return tuple(
        Sample(
            trajectory,
            0,
            float(trajectory % 2),
            False,
            length,
            random.integers(0, IDS, length).astype("<i4").tobytes(),
            mask.tobytes(),
            np.full(length, -10.8, "<f4").tobytes(),
            mask.tobytes(),
        )
        for trajectory in range(4)
    )


def join(directory: str) -> None:
    use_one_thread()
    return_large_blocks()
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)


def whole_steps(tokens: int, directory: str, answer: Any) -> None:
    """In a process of its own: two steps and their snapshots -> peak resident bytes."""
    join(directory)
    checkpoints = CheckpointStore(Path(directory) / "checkpoints", keep=2)
    trainer = Trainer(config(tokens), IDS, CPU, checkpoints, Progress())
    store = SnapshotStore(0, 0, "localhost", 4 << 20)
    trainer.begin(0, ())
    for step in range(2):
        trainer.train(step, batch(tokens))
        trainer.publish(store)
    answer.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def peak_bytes(tokens: int, directory: str) -> int:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=whole_steps, args=(tokens, directory, there)
    )
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        raise SystemExit("the process of the whole steps died") from None
    process.join()
    assert isinstance(found, int)
    return found


class Sides:
    """Forward and backward of the same micro-batch, in PEARL's way and in the plain one."""

    def __init__(self, tokens: int) -> None:
        settings = config(tokens)
        samples = batch(tokens)
        ids = [np.frombuffer(sample.ids, "<i4") for sample in samples]
        self._packed: Packed = pack(ids, [np.arange(8, len(row)) for row in ids], CPU)
        self._policy = Policy(settings.model, IDS, 0, CPU)
        self._plain = build_model(settings.model, IDS, 0)
        attach_attention(self._plain, NAME, tokens)

    def ours(self) -> None:
        for parameter in self._policy.parameters.values():
            parameter.grad = None
        self._policy.backward(self._policy.score(self._packed, 1.0).logprobs_M.mean())

    def plain(self) -> None:
        self._plain.zero_grad()
        torch.autograd.backward(score(self._plain, self._packed, 1.0).logprobs_M.mean())

    def gradient_difference(self) -> float:
        """Relative, of the parameter where it is largest."""
        own = list(self._policy.gradients())
        theirs = [p.grad for p in self._plain.parameters() if p.grad is not None]
        return max(
            ((one - other).norm() / other.norm()).item() for one, other in zip(own, theirs, strict=True)
        )


def timed(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--time-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.mkdir(f"{directory}/whole")
        peak = peak_bytes(options.tokens, f"{directory}/whole")
        print(f"peak resident memory at {options.tokens} tokens: {peak / 1e9:.2f} GB")
        join(directory)
        sides = Sides(options.time_tokens)
        sides.plain()
        sides.ours()
        difference = sides.gradient_difference()
        pairs = [(timed(sides.ours), timed(sides.plain)) for _ in range(options.rounds)]
        ratio = statistics.median(ours / plain for ours, plain in pairs)
        seconds = [statistics.median(side) for side in zip(*pairs, strict=True)]
        print(
            f"forward and backward at {options.time_tokens} tokens: {seconds[0]:.1f} s of CPU, "
            f"plain {seconds[1]:.1f} s, ratio {ratio:.2f}; gradients differ by {difference:.1e}"
        )
        dist.destroy_process_group()
    fits = peak <= MEMORY_LIMIT and ratio <= TIME_LIMIT and difference <= GRADIENT_LIMIT
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
