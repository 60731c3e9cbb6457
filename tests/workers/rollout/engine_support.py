"""Models, images and requests for the tests of rollout engines."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from pearl.types.config import ModelConfig
from pearl.types.messages.rollout import SamplingParams
from pearl.types.trajectory import VersionRun
from pearl.types.weights import BucketSpec, TensorSpec, Version
from pearl.workers.model import build_model
from pearl.workers.rollout.protocol import Delta, GenerateRequest
from pearl.workers.rollout.torch_engine.core import EngineCore
from pearl.workers.rollout.torch_engine.settings import EngineSettings
from pearl.workers.weight_transfer.checksum import canonical_tensors, dtype_name, model_checksum, tensor_bytes
from pearl.workers.weight_transfer.snapshot_layout import bucket_edges, image_bytes, lay_out

VOCABULARY = 32
MODEL = ModelConfig(initializer_range=0.2)  # spread logits: no near ties between ids


@dataclass(frozen=True)
class Image:
    """A published version as its bytes."""

    version: Version
    tensors: tuple[TensorSpec, ...]
    data: bytes
    checksum: str

    def buckets(self, num_bytes: int) -> list[tuple[BucketSpec, memoryview]]:
        edges = bucket_edges(len(self.data), num_bytes)
        view = memoryview(self.data)
        return [(BucketSpec(start, size, ""), view[start : start + size]) for start, size in edges]


@functools.cache
def reference(seed: int) -> PreTrainedModel:
    """The model whose weights version ``seed`` is; not to be changed."""
    torch.set_num_threads(1)
    return build_model(MODEL, VOCABULARY, seed)


@functools.cache
def image(seed: int) -> Image:
    tensors = canonical_tensors(reference(seed))
    specs = lay_out((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors)
    data = bytearray(image_bytes(specs))
    for spec, (_, tensor) in zip(specs, tensors, strict=True):
        data[spec.offset : spec.offset + spec.num_bytes] = tensor_bytes(tensor)
    return Image(Version(0, seed), specs, bytes(data), model_checksum(reference(seed)))


def fresh_core(**settings: int) -> EngineCore:
    """Without weights."""
    return EngineCore(build_model(MODEL, VOCABULARY, 99), EngineSettings(**settings))  # type: ignore[arg-type]


def take(core: EngineCore, version: Image, bucket_bytes: int = 1 << 20) -> str:
    core.begin_update(version.version, version.tensors)
    for bucket, data in version.buckets(bucket_bytes):
        core.update_bucket(bucket, data)
    return core.end_update()


def ready_core(seed: int = 1, **settings: int) -> EngineCore:
    core = fresh_core(**settings)
    take(core, image(seed))
    return core


def ids(seed: int, count: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


def request(
    attempt: int,
    context: Sequence[int] | npt.NDArray[np.int32],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    stop_ids: tuple[int, ...] = (),
    seed: int | None = None,
) -> GenerateRequest:
    params = SamplingParams(max_new_tokens, temperature, stop_ids)
    return GenerateRequest(attempt, np.array(context, np.int32), params, attempt if seed is None else seed)


@dataclass
class Answer:
    """All deltas of one attempt."""

    ids: list[int]
    logprobs: list[float]
    runs: list[VersionRun]
    prefilled: int
    finish: str | None
    error: str


def gather(found: dict[int, Answer], delta: Delta) -> None:
    answer = found.setdefault(delta.attempt, Answer([], [], [], 0, None, ""))
    assert answer.finish is None, f"attempt {delta.attempt} goes on after its end"
    assert len(delta.ids) == len(delta.logprobs) == sum(run.count for run in delta.runs)
    answer.ids += delta.ids
    answer.logprobs += delta.logprobs
    answer.runs += delta.runs
    answer.prefilled += delta.prefilled_tokens
    answer.finish, answer.error = delta.finish, delta.error


def answers(deltas: list[Delta]) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for delta in deltas:
        gather(found, delta)
    return found


def run(core: EngineCore, *requests: GenerateRequest) -> dict[int, Answer]:
    """Submit, run to the end, and hand out everything the core has said so far."""
    for entry in requests:
        core.submit(entry)
    while core.step():
        pass
    return answers(core.deltas)


def generate_one(core: EngineCore, entry: GenerateRequest) -> Answer:
    before = len(core.deltas)
    core.submit(entry)
    while core.step():
        pass
    return answers(core.deltas[before:])[entry.attempt]


def steps(core: EngineCore, count: int) -> None:
    for _ in range(count):
        assert core.step()


def greedy_reference(model: PreTrainedModel, context: npt.NDArray[np.int32], count: int) -> list[int]:
    if count == 0:  # of an answer that ended before its first token; generate() refuses to make none
        return []
    tokens = torch.tensor(context[None].astype(np.int64))
    output = model.generate(  # type: ignore[operator]
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    found: list[int] = output[0, len(context) :].tolist()
    return found


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, context: npt.NDArray[np.int32], generated: list[int], temperature: float = 1.0
) -> list[float]:
    """Of each generated token, by one full forward pass without any cache."""
    tokens = torch.tensor([[*context.tolist(), *generated]])
    scores = (model(tokens).logits[0] / temperature).log_softmax(-1)
    first = len(context) - 1
    return [scores[first + index, token].item() for index, token in enumerate(generated)]


def all_pages_free(core: EngineCore) -> bool:
    core.flush()
    pool = core.scheduler.pool
    return pool.num_free == pool.num_pages
