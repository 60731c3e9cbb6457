"""Coordinator and the training world (its rank 0 speaks; it rebroadcasts to the other ranks)."""

import msgspec

from pearl.types.comparison import Comparison
from pearl.types.weights import Snapshot


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory as the trainer sees it. All packed arrays have ``num_tokens`` entries; position i's log-prob and
    versions are those of emitting ids[i]. Prompt and observation positions have mask 0, log-prob 0."""

    trajectory: int
    group: int
    reward: float
    masked: bool  # out of loss and baseline
    num_tokens: int
    ids: bytes  # int32
    mask: bytes  # uint8: 1 where generated
    logprobs: bytes  # float32, rollout side
    current: bytes  # uint8: 1 where token and all its KV were made under the version being trained


class AddSamples(msgspec.Struct, frozen=True, tag=True):
    """Part of the batch for ``step``; sent in pieces so that no frame grows with the batch. Call; answered by Ack."""

    step: int
    samples: tuple[Sample, ...]


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Train on the samples added for ``step`` (exactly ``num_samples``, in trajectory order whatever their arrival)."""

    step: int
    num_samples: int
    checkpoint: bool


class TrainStepReply(msgspec.Struct, frozen=True, tag=True):
    snapshot: Snapshot  # the new version, already in host memory
    checkpoint_step: int | None
    metrics: dict[str, float]  # finite only: loss, grad_norm, lr, entropy, clip_ratio, tis_mean, …
    max_logprob_gap: float  # |rollout - training| over tokens with current = 1; 0.0 when there are none
    logprob_gap_tokens: int


class Demonstration(msgspec.Struct, frozen=True, array_like=True):
    ids: bytes  # int32
    weights: bytes  # float32 loss weight a position (0 = not trained)


class AddDemonstrations(msgspec.Struct, frozen=True, tag=True):
    demonstrations: tuple[Demonstration, ...]


class StartTraining(msgspec.Struct, frozen=True, tag=True):
    """First command: build or restore. ``restore_step`` None = fresh weights, then the supervised warm start on the
    demonstrations added before; otherwise the checkpoint of that step (-1 = the newest complete one)."""

    lineage: int
    restore_step: int | None
    compare: bool = False  # the policy with plain transformers, before the answer


class StartTrainingReply(msgspec.Struct, frozen=True, tag=True):
    snapshot: Snapshot
    restored: bool
    metrics: dict[str, float]
    comparison: Comparison | None = None  # what came of it; None = it was not asked for


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Between steps: move all training state off the devices and verify that the memory is free. The snapshot stays
    served. Samples may still be added."""


class OffloadReply(msgspec.Struct, frozen=True, tag=True):
    released_bytes: int  # over all ranks, measured
    parts: dict[str, float]  # seconds of the slowest rank: backup, release, verify


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Bring the state back bit-identical (its digest is compared); an error when it is not."""


class RestoreReply(msgspec.Struct, frozen=True, tag=True):
    parts: dict[str, float]  # seconds of the slowest rank: restore, verify


TrainingMessage = (
    AddSamples
    | TrainStep
    | TrainStepReply
    | AddDemonstrations
    | StartTraining
    | StartTrainingReply
    | Offload
    | OffloadReply
    | Restore
    | RestoreReply
)
