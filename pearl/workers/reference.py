"""The model as plain ``transformers`` computes it, to compare trainer and engines with.

Its weights are those of a published version; nothing else is shared with trainer and engine, neither how the model is
built from its directory, nor masks and attention (its own eager ones), nor sampling. The one exception is the choice
of factors of a rope that depends on the longest context, which is the run's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pearl.types.config import AgreementConfig, ModelConfig
from pearl.types.weights import BucketSpec, TensorSpec
from pearl.workers.architecture.positions import freeze_positions
from pearl.workers.model import TINY_MODEL, build_model
from pearl.workers.weight_transfer.checksum import canonical_tensors

MAX_MEAN_GAPS = {"float32": 5e-5, "bfloat16": 0.1}
"""Nats, over all tokens of a comparison. Rounding makes about 1e-6 and 1e-2."""
MAX_GAPS = {"float32": 5e-4, "bfloat16": float("inf")}
"""Of a single token. In bfloat16 a router now and then chooses another expert: several nats, and nothing is wrong."""
LEFT_OUT = {"float32": 0.0, "bfloat16": 0.1}
"""Share of the tokens, those with the largest gaps, that the mean leaves out for the same reason."""
MAX_POSITIONS = 64
"""That are compared of one sequence."""
PROMPT_SEED = 20260101
SHORT_TOKENS = 12

Buckets = Sequence[tuple[BucketSpec, memoryview]]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of one sequence; ``positions`` are those of the tokens."""

    what: str  # the sequence, for people
    positions: list[int]
    ours: list[float]
    reference: list[float]

    def values(self) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.abs(np.array(self.ours) - np.array(self.reference))
        return found


class Reference:
    """On the CPU, in float32. Blocking; for one thread."""

    def __init__(self, config: ModelConfig, vocabulary_size: int, max_context_tokens: int) -> None:
        self._vocabulary_size = vocabulary_size
        self.model = _plain_model(config, vocabulary_size)
        # transformers would choose a "longrope"'s factors by the length of each prompt; a run has one choice.
        freeze_positions(self.model, max_context_tokens)
        self.model.train(False)

    def load(self, tensors: Sequence[TensorSpec], buckets: Buckets) -> None:
        """Take the weights of a published image. Raises ValueError when they are not those of the model."""
        targets = dict(canonical_tensors(self.model))
        if missing := targets.keys() ^ {spec.name for spec in tensors}:
            raise ValueError(f"transformers and the published version do not both have {min(missing)!r}")
        for spec in tensors:
            targets[spec.name].copy_(tensor_of(spec, buckets))

    def first_difference(self, tensors: Sequence[TensorSpec], buckets: Buckets) -> str:
        """A tensor of the image that is not that of the model's directory; "" = none. Before ``load``."""
        own = dict(canonical_tensors(self.model))
        for spec in tensors:
            published = tensor_of(spec, buckets)
            ours = own.get(spec.name)
            if ours is None or not torch.equal(ours.to(published.dtype), published):
                return spec.name
        return ""

    @torch.inference_mode()
    def logprobs(self, ids: Ids, positions: Sequence[int], temperature: float) -> torch.Tensor:
        """[positions, vocabulary]: of softmax(logits / temperature) from which the token at each is drawn; 1 for 0."""
        row = torch.from_numpy(ids.astype(np.int64))[None]
        # Rows beyond the environment's ids are padding, which has no probability.
        logits = self.model(input_ids=row, use_cache=False).logits[0, :, : self._vocabulary_size]
        wanted = logits[torch.tensor([position - 1 for position in positions])].double()
        found: torch.Tensor = (wanted / (temperature or 1.0)).log_softmax(-1)
        return found


def _plain_model(config: ModelConfig, vocabulary_size: int) -> PreTrainedModel:
    if config.path == TINY_MODEL:  # defined nowhere else
        tiny = build_model(msgspec.structs.replace(config, dtype="float32"), vocabulary_size, 0)
        tiny.set_attn_implementation("eager")
        return tiny
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        config.path,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
    )
    return model


def tensor_of(spec: TensorSpec, buckets: Buckets) -> torch.Tensor:
    """A copy of one tensor of the image."""
    data = bytearray(spec.num_bytes)
    for bucket, view in buckets:
        first = max(spec.offset, bucket.offset)
        end = min(spec.offset + spec.num_bytes, bucket.offset + bucket.num_bytes)
        if first < end:
            part = view[first - bucket.offset : end - bucket.offset]
            data[first - spec.offset : end - spec.offset] = part
    kind: torch.dtype = getattr(torch, spec.dtype)
    if not data:
        return torch.empty(spec.shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).view(spec.shape)


def why_skipped(agreement: AgreementConfig, num_elements: int) -> str:
    """Why a model of so many weights is not compared; "" = it is."""
    num_bytes = 4 * num_elements
    if num_bytes <= agreement.max_model_bytes:
        return ""
    return (
        f"it takes {num_bytes >> 20} MiB in float32, agreement.max_model_bytes allows "
        f"{agreement.max_model_bytes >> 20}"
    )


def prompt(vocabulary_size: int, length: int) -> Ids:
    """The same ids in every process."""
    return np.random.default_rng([PROMPT_SEED, length]).integers(0, vocabulary_size, length).astype(np.int32)


def some_positions(first: int, end: int) -> list[int]:
    """All of them, or the first, the last and some between."""
    count = end - first
    if count <= MAX_POSITIONS:
        return list(range(first, end))
    quarter = MAX_POSITIONS // 4
    between = np.linspace(first + quarter, end - quarter - 1, MAX_POSITIONS - 2 * quarter).astype(int)
    return sorted({*range(first, first + quarter), *between.tolist(), *range(end - quarter, end)})


def complaint(part: str, config: ModelConfig, found: Sequence[Gaps]) -> str:
    """Return what is wrong with the log-probs of ``part``; "" means they are those of transformers."""
    limit = MAX_MEAN_GAPS[config.dtype]
    _, largest = statistics(found)
    mean = _mean_of_most(found, LEFT_OUT[config.dtype])
    if mean <= limit and largest <= MAX_GAPS[config.dtype]:
        return ""
    worst = max(found, key=lambda gaps: _largest(gaps.values()))
    values = worst.values()
    place = int(np.argmax(np.where(np.isfinite(values), values, np.inf)))
    return (
        f"{part} does not compute the model {config.path!r} as transformers does: at position "
        f"{worst.positions[place]} of {worst.what} its log-prob is {worst.ours[place]:.4f}, that of transformers "
        f"{worst.reference[place]:.4f}; the gap is {mean:.3g} nats on average, {limit:g} in {config.dtype} at most"
    )


def statistics(found: Sequence[Gaps]) -> tuple[float, float]:
    """(mean, largest) over all tokens; infinite when one is no number."""
    values = np.concatenate([gaps.values() for gaps in found])
    if not np.isfinite(values).all():
        return float("inf"), float("inf")
    return float(values.mean()), float(values.max())


def _mean_of_most(found: Sequence[Gaps], left_out: float) -> float:
    values = np.sort(np.concatenate([gaps.values() for gaps in found]))
    if not np.isfinite(values).all():
        return float("inf")
    return float(values[: len(values) - int(len(values) * left_out)].mean())


def _largest(values: npt.NDArray[np.float64]) -> float:
    return float(np.where(np.isfinite(values), values, np.inf).max())


def long_tokens(agreement: AgreementConfig, max_context_tokens: int) -> int:
    """Length of the long sequence."""
    return min(agreement.max_compared_tokens, max_context_tokens)
