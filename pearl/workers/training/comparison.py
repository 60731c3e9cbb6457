"""Compares the policy, as training computes it, with plain ``transformers``: once, before the first step.

Sequences of several lengths share one packed row, as they do in training, so that whatever mixes them up shows.
"""

import time

import numpy as np
import torch
import torch.distributed as dist

from pearl.types.comparison import Comparison
from pearl.types.config import Config
from pearl.types.weights import Snapshot
from pearl.workers import reference
from pearl.workers.model import TINY_MODEL
from pearl.workers.reference import Buckets, Gaps, Ids, Reference
from pearl.workers.training.packing import pack
from pearl.workers.training.trainer import Trainer
from pearl.workers.weight_transfer.mapped_image import MappedImage

MIDDLE_SHARE = 0.4
"""Of the long sequence's length."""


def compare(
    trainer: Trainer, config: Config, vocabulary_size: int, snapshot: Snapshot | None, *, is_untrained: bool
) -> Comparison | None:
    """A collective; the result is that of rank 0, which has the ``snapshot`` of the very weights that the policy has.
    ``is_untrained``: they are still those of the model's directory."""
    policy = trainer.policy
    num_elements = sum(tensor.numel() for _, tensor in policy.tensors())
    if skipped := reference.why_skipped(config.agreement, num_elements):
        return Comparison(skipped=skipped)
    began = time.monotonic()
    sequences = _sequences(config, vocabulary_size)
    positions = [reference.some_positions(1, len(ids)) for ids in sequences]
    packed = pack(sequences, [np.array(places) for places in positions], policy.device)
    with torch.no_grad():
        ours = trainer.score(packed).logprobs_M.double().cpu()
    policy.reshard()
    if snapshot is None or dist.get_rank():
        return None
    try:
        plain, error = _reference(config, vocabulary_size, snapshot, is_untrained)
    # transformers raises what it likes; the run ends with the text.
    except Exception as failure:  # noqa: BLE001
        text = f"transformers' own model cannot be had to compare with: {type(failure).__name__}: {failure}"
        return Comparison(error=text)
    found, first = [], 0
    for ids, places in zip(sequences, positions, strict=True):
        values = ours[first : first + len(places)].tolist()
        first += len(places)
        rows = plain.logprobs(ids, places, config.rollout.temperature)
        targets = torch.from_numpy(ids[places].astype(np.int64))
        expected = rows.gather(1, targets[:, None])[:, 0].tolist()
        found.append(Gaps(f"a sequence of {len(ids)} tokens", places, values, expected))
    error = error or reference.complaint("training", config.model, found)
    mean, largest = reference.statistics(found)
    if not np.isfinite(mean):
        mean = largest = 0.0  # the error says it
    return Comparison(first, mean, largest, 0, time.monotonic() - began, "", error)


def _sequences(config: Config, vocabulary_size: int) -> list[Ids]:
    most = reference.long_tokens(config.agreement, config.rollout.max_context_tokens)
    lengths = (min(reference.SHORT_TOKENS, most), most, max(2, int(MIDDLE_SHARE * most)))
    return [reference.prompt(vocabulary_size, length) for length in lengths]


def _reference(
    config: Config, vocabulary_size: int, snapshot: Snapshot, is_untrained: bool
) -> tuple[Reference, str]:
    """Compute the reference with the published weights, and what is wrong with these; "" means nothing that can be
    seen here."""
    plain = Reference(config.model, vocabulary_size, config.rollout.max_context_tokens)
    image = MappedImage(snapshot, snapshot.sources[0])
    try:
        buckets: Buckets = [(bucket, image.bucket(bucket)) for bucket in snapshot.buckets]
        name = ""
        if is_untrained and config.model.path != TINY_MODEL:
            name = plain.first_difference(snapshot.tensors, buckets)
        plain.load(snapshot.tensors, buckets)
        del buckets
    finally:
        image.close()
    error = f"training published {name!r} otherwise than {config.model.path!r} has it" if name else ""
    return plain, error
