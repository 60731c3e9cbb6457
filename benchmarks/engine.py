"""How fast the torch engine is beside ``transformers`` itself, on one CPU core and the built-in model.

    OMP_NUM_THREADS=1 python benchmarks/engine.py [--rounds N]

Prints new tokens a second and the engine's ratio to each rival, the median of paired rounds in turn (a busy machine
slows both sides of a pair). Exit status 1 when a ratio is short: 0.8 of ``generate`` on 16 equal requests, 1.0 on 64
of mixed length (which ``generate`` must pad and run to the longest), 2.0 of ``generate_batch``.
"""

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pearl.types.config import ModelConfig
from pearl.types.messages.rollout import SamplingParams
from pearl.types.weights import BucketSpec, Version
from pearl.workers.model import build_model, use_one_thread
from pearl.workers.rollout.protocol import GenerateRequest
from pearl.workers.rollout.torch_engine.core import EngineCore
from pearl.workers.rollout.torch_engine.settings import EngineSettings
from pearl.workers.weight_transfer.checksum import canonical_tensors, dtype_name, tensor_bytes
from pearl.workers.weight_transfer.snapshot_layout import image_bytes, lay_out

VOCABULARY = 32
Workload = list[tuple[list[int], int]]
"""(prompt, new tokens) of each request; never two alike, so that no prefix is shared."""


def equal_requests() -> Workload:
    random = np.random.default_rng(0)
    return [(random.integers(1, VOCABULARY, 32).tolist(), 64) for _ in range(16)]


def mixed_requests() -> Workload:
    random = np.random.default_rng(1)
    return [
        (random.integers(1, VOCABULARY, random.integers(8, 96)).tolist(), int(random.integers(4, 96)))
        for _ in range(64)
    ]


class Engine:
    """The engine under test; its cache is emptied before every run."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._core = EngineCore(build_model(ModelConfig(), VOCABULARY, 1), EngineSettings())
        tensors = canonical_tensors(model)
        specs = lay_out((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors)
        data = bytearray(image_bytes(specs))
        for spec, (_, tensor) in zip(specs, tensors, strict=True):
            data[spec.offset : spec.offset + spec.num_bytes] = tensor_bytes(tensor)
        self._core.begin_update(Version(0, 0), specs)
        self._core.update_bucket(BucketSpec(0, len(data), ""), memoryview(data))
        self._core.end_update()

    def __call__(self, workload: Workload) -> int:
        core = self._core
        core.flush()
        core.deltas.clear()
        for attempt, (prompt, count) in enumerate(workload):
            params = SamplingParams(count, 0.0, ())
            core.submit(GenerateRequest(attempt, np.array(prompt, np.int32), params, attempt))
        while core.step():
            pass
        return sum(len(delta.ids) for delta in core.deltas)


def generate(model: PreTrainedModel, workload: Workload) -> int:
    """One padded batch, run to its longest answer; only the tokens that were asked for count."""
    longest = max(len(prompt) for prompt, _ in workload)
    tokens = torch.zeros((len(workload), longest), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, (prompt, _) in enumerate(workload):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    count = max(count for _, count in workload)
    model.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    return sum(count for _, count in workload)


def generate_batch(model: PreTrainedModel, workload: Workload) -> int:
    """The library's own continuous batching; it has one length for all, so it gets equal requests only."""
    count = max(count for _, count in workload)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=1024, max_batch_tokens=512)
    outputs = model.generate_batch(  # type: ignore[operator]
        [prompt for prompt, _ in workload], settings, batching, warmup=False
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def _timed(run: Callable[[], int]) -> float:
    """Seconds a token."""
    started = time.perf_counter()
    count = run()
    return (time.perf_counter() - started) / count


def compare(name: str, ours: Callable[[], int], theirs: Callable[[], int], rounds: int, least: float) -> bool:
    _timed(ours), _timed(theirs)
    pairs = [(_timed(ours), _timed(theirs)) for _ in range(rounds)]
    ratio = statistics.median(b / a for a, b in pairs)
    speeds = [1 / statistics.median(column) for column in zip(*pairs, strict=True)]
    good = ratio >= least
    print(
        f"{name:42} {speeds[0]:8.0f} tok/s, rival {speeds[1]:8.0f} tok/s: {ratio:5.2f}x "
        f"(at least {least:.1f}x) {'ok' if good else 'SHORT'}"
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.basicConfig(level=logging.ERROR)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    use_one_thread()
    model = build_model(ModelConfig(), VOCABULARY, 0)
    batched = build_model(ModelConfig(), VOCABULARY, 0)  # continuous batching changes its model's attention
    engine, equal, mixed = Engine(model), equal_requests(), mixed_requests()
    results = [
        compare(
            "16 equal requests, generate", lambda: engine(equal), lambda: generate(model, equal), rounds, 0.8
        ),
        compare(
            "64 mixed requests, generate", lambda: engine(mixed), lambda: generate(model, mixed), rounds, 1.0
        ),
        compare(
            "16 equal requests, generate_batch",
            lambda: engine(equal),
            lambda: generate_batch(batched, equal),
            rounds,
            2.0,
        ),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
