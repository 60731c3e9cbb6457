"""One rank of the training world: builds or restores the policy, trains steps, publishes versions, saves.

Every public method is a collective: all ranks call it with the same arguments, in the same order. Blocking;
belongs to one thread.
"""

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from pearl.runtime.errors import FinalError
from pearl.runtime.extensions import load_extension
from pearl.types.config import Config, TrainingConfig
from pearl.types.messages.training import Demonstration, Sample
from pearl.types.weights import Snapshot, Version
from pearl.workers.training import fsdp
from pearl.workers.training.advantages import advantage_function, shuffle_in_groups
from pearl.workers.training.batching import deal_groups
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.fsdp import Policy
from pearl.workers.training.grpo import LossSettings, TokenBatch, token_losses
from pearl.workers.training.learning_rate import learning_rate
from pearl.workers.training.micro_batch import MicroBatch, Update, make_update
from pearl.workers.training.objectives import kl_estimates
from pearl.workers.training.packing import Packed
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.samples import TrainingSample, unpack
from pearl.workers.training.scoring import Scores
from pearl.workers.training.step_metrics import StepMetrics, finite_only, sample_metrics
from pearl.workers.training.warm_start import warm_start
from pearl.workers.weight_transfer.checksum import dtype_name
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore
from pearl.workers.weight_transfer.snapshot_layout import lay_out

log = logging.getLogger(__name__)

MODEL, OPTIMIZER, REFERENCE = "model", "optimizer", "reference"
"""Parts of a checkpoint; the last one only with a KL term."""


FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class StepResult:
    metrics: dict[str, float]
    max_logprob_gap: float
    logprob_gap_tokens: int


def loss_settings(training: TrainingConfig) -> LossSettings:
    """Raises ValueError when ``training.loss`` names nothing that can be called."""
    return LossSettings(
        training.clip_low,
        training.clip_high,
        training.tis_cap,
        training.kl_coefficient if training.kl_in == "loss" else 0.0,
        training.objective,
        training.correction_level,
        training.correction_kind,
        training.correction_low,
        training.kl_estimator,
        training.entropy_coefficient,
        training.loss,
        load_extension("training.loss", training.loss) if training.loss else None,
    )


class Trainer:
    def __init__(
        self,
        config: Config,
        vocabulary_size: int,
        device: torch.device,
        checkpoints: CheckpointStore,
        progress: Progress,
    ) -> None:
        self.version = Version(-1, -1)  # until it is started
        self.progress = progress
        training = config.training
        self.policy = Policy(
            config.model,
            vocabulary_size,
            config.run.seed,
            device,
            training.activation_checkpointing,
            config.rollout.max_context_tokens,
        )
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._checkpoints = checkpoints
        self._rank = dist.get_rank()
        self._loss = loss_settings(training)
        self._advantages = advantage_function(training.advantage, training.normalize_by_std)
        self._optimizer = self._new_optimizer()
        self._reference: dict[str, torch.Tensor] | None = None  # the weights that a KL term is against

    def _new_optimizer(self) -> torch.optim.AdamW:
        training = self._config.training
        return fsdp.make_optimizer(self.policy, training.learning_rate, training.betas, training.weight_decay)

    # beginning

    def begin(self, lineage: int, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """Fresh weights, then the supervised warm start -> its metrics."""
        config = self._config
        metrics: dict[str, float] = {}
        if config.warm_start.num_steps:
            self.progress.busy = "warm start"
            metrics = warm_start(
                self.policy,
                demonstrations,
                config.warm_start,
                config.training.tokens_per_micro_batch,
                config.run.seed,
                self.progress.count,
            )
        self._optimizer = self._new_optimizer()
        self._keep_reference()
        self.version = Version(lineage, 0)
        return finite_only(metrics.items())

    def restore(self, lineage: int, step: int) -> None:
        """Raises ValueError when the checkpoint is not there, or is of another model."""
        self.progress.busy = "checkpoint"
        checkpoint = self._checkpoints.open(step)
        if checkpoint.description.config_digest != self.config_digest:
            raise ValueError(
                f"the checkpoint of step {step} was made with other [model] settings or another vocabulary: "
                "resume with the config.toml of the run it belongs to"
            )
        with checkpoint.reader(MODEL) as read:
            self.policy.load(read)
        self._optimizer = self._new_optimizer()
        with checkpoint.reader(OPTIMIZER) as read:
            fsdp.load_optimizer(self.policy, self._optimizer, read.names(), read)
        if self._config.training.kl_coefficient and REFERENCE in checkpoint.parts():
            with checkpoint.reader(REFERENCE) as read:
                own = self.policy.tensors()
                self._reference = {name: fsdp.shard_like(read(name), tensor) for name, tensor in own}
        else:
            self._keep_reference()
        self.version = Version(lineage, step)

    def _keep_reference(self) -> None:
        self._reference = self.policy.clone() if self._config.training.kl_coefficient else None

    @property
    def config_digest(self) -> str:
        """Digest what decides the shape and the meaning of the weights."""
        model = msgspec.structs.replace(self._config.model, device="auto")
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode((model, self._vocabulary_size)))

    # a step

    def train(self, step: int, samples: Sequence[Sample]) -> StepResult:
        """Train the samples, in trajectory order whatever their order here, into the next version."""
        assert step == self.version.step, (step, self.version)
        self.progress.busy = "training"
        unpacked = unpack(samples, self.policy.vocabulary_size)
        updates = self._updates(unpacked)
        tally = StepMetrics(self.policy.device)
        self._compute_old_logprobs(updates)
        self._set_advantages(step, unpacked, updates)
        rate = learning_rate(step, self._config.training, self._config.run.num_steps)
        norms, skipped = [0.0], 0
        for update in updates:
            if update.num_tokens:
                norm, is_done = self._update(update, rate, tally)
                norms.append(norm)
                skipped += not is_done
        self.version = Version(self.version.lineage, step + 1)
        period = self._config.training.reference_reset_every
        if period and (step + 1) % period == 0:
            self._keep_reference()
        sums = tally.reduce()
        num_updates = sum(update.num_tokens > 0 for update in updates)
        metrics = {
            **sums.means(sum(update.num_tokens for update in updates), num_updates),
            **sample_metrics(unpacked),
            "grad_norm": float(np.max(norms)),  # NaN stays NaN, and is then left out
            "learning_rate": rate,
            "updates": float(num_updates - skipped),
            "updates_skipped": float(skipped),
        }
        return StepResult(finite_only(metrics.items()), sums.max_gap, sums.gap_tokens)

    def _set_advantages(
        self, step: int, samples: Sequence[TrainingSample], updates: Sequence[Update]
    ) -> None:
        training = self._config.training
        groups_S = np.array([sample.group for sample in samples], np.int64)
        masked_S = np.array([sample.masked for sample in samples], np.bool_)
        rewards_S = np.array([sample.reward for sample in samples])
        if training.kl_in == "reward" and self._reference is not None:
            rewards_S = rewards_S - training.kl_coefficient * self._trajectory_kl(len(samples), updates)
        advantages_S = self._advantages(rewards_S, groups_S, masked_S)
        if training.shuffle_advantages:
            advantages_S = shuffle_in_groups(advantages_S, groups_S, masked_S, self._config.run.seed, step)
        for micro_batch in self._each(updates):
            micro_batch.set_advantages(advantages_S)

    def _trajectory_kl(self, num_samples: int, updates: Sequence[Update]) -> npt.NDArray[np.float64]:
        """The divergence from the reference, summed over each trajectory's tokens, on all ranks."""
        kl_S = torch.zeros(num_samples, dtype=torch.float64, device=self.policy.device)
        for micro_batch in self._each(updates):
            assert micro_batch.old_M is not None
            assert micro_batch.reference_M is not None
            kl_M = kl_estimates(self._loss.kl_estimator, micro_batch.old_M, micro_batch.reference_M)
            kl_S.index_add_(0, micro_batch.places_M, kl_M.double())
        dist.all_reduce(kl_S)
        return kl_S.cpu().numpy()

    def _updates(self, samples: Sequence[TrainingSample]) -> list[Update]:
        training = self._config.training
        groups = [sample.group for sample in samples]
        return [
            make_update(
                samples,
                chosen,
                self.policy.num_ranks,
                self._rank,
                training.tokens_per_micro_batch,
                self.policy.flops,
                self.policy.device,
                training.loss_aggregation,
                self._config.rollout.max_context_tokens,
            )
            for chosen in deal_groups(groups, training.updates_per_step)
        ]

    def _compute_old_logprobs(self, updates: Sequence[Update]) -> None:
        """Log-probs that the loss needs and that its own pass does not give."""
        if len(updates) > 1 or (self._reference is not None and self._config.training.kl_in == "reward"):
            for micro_batch in self._each(updates):
                micro_batch.old_M = self._logprobs_no_grad(micro_batch)
            self.policy.reshard()
        if self._reference is not None:
            own = self.policy.clone()
            self.policy.assign(self._reference)
            for micro_batch in self._each(updates):
                micro_batch.reference_M = self._logprobs_no_grad(micro_batch)
            self.policy.reshard()
            self.policy.assign(own)

    @torch.no_grad()
    def _logprobs_no_grad(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self._score(micro_batch).logprobs_M

    def _each(self, updates: Sequence[Update]) -> list[MicroBatch]:
        return [micro_batch for update in updates for micro_batch in update.micro_batches]

    def _score(self, micro_batch: MicroBatch) -> Scores:
        return self.score(micro_batch.packed)

    def score(self, packed: Packed) -> Scores:
        """Score as a step does."""
        return self.policy.score(packed, self._config.rollout.temperature)

    def _update(self, update: Update, rate: float, tally: StepMetrics) -> tuple[float, bool]:
        for micro_batch in update.micro_batches:
            self._accumulate(micro_batch, tally)
            self.progress.count()
        return fsdp.apply_update(self.policy, self._optimizer, rate, self._config.training.max_grad_norm)

    def _accumulate(self, micro_batch: MicroBatch, tally: StepMetrics) -> None:
        scores = self.policy.score(
            micro_batch.packed, self._config.rollout.temperature, self._loss.entropy_coefficient != 0
        )
        old_M = scores.logprobs_M.detach() if micro_batch.old_M is None else micro_batch.old_M
        tokens = TokenBatch(
            old_M,
            micro_batch.rollout_M,
            micro_batch.advantages_M,
            micro_batch.reference_M,
            micro_batch.rows_M,
            micro_batch.shares_M,
        )
        loss, statistics = token_losses(scores.logprobs_M, tokens, self._loss, scores.entropy_M)
        self.policy.backward(loss)
        tally.add_losses(statistics, loss, scores)
        tally.add_gap(old_M, micro_batch.rollout_M, micro_batch.current_M)

    # what comes out

    def publish(self, store: SnapshotStore | None) -> Snapshot | None:
        """Gather the weights tensor by tensor into ``store``, which rank 0 has; the others only take part."""
        own = self.policy.served_tensors()
        if store is None:
            for _, tensor in own:
                fsdp.full_tensor(tensor)
            return None
        specs = lay_out((name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in own)
        with store.writing(self.version, specs) as writer:
            for name, tensor in own:
                writer.write(name, fsdp.full_tensor(tensor))
        return store.latest

    def state(self) -> list[torch.Tensor]:
        """All that this rank keeps on its device between steps, the gathered weights of a forward given up. No
        collective."""
        self.policy.reshard()
        weights = [tensor for _, tensor in self.policy.tensors()]
        moments = [tensor for _, tensor in fsdp.optimizer_tensors(self.policy, self._optimizer)]
        gradients = list(self.policy.gradients())
        return weights + moments + gradients + list((self._reference or {}).values())

    def save(self) -> bool:
        """Write a checkpoint of the current version -> whether it is complete (always true off rank 0).

        A disk that fails costs this checkpoint, not the training: the last good one stays.

        Raises:
            FinalError: the disk is full, which does not pass by itself (on rank 0); the last good one stays.
        """
        self.progress.busy = "checkpoint"
        parts: list[tuple[str, list[tuple[str, torch.Tensor]]]] = [
            (MODEL, self.policy.tensors()),
            (OPTIMIZER, fsdp.optimizer_tensors(self.policy, self._optimizer)),
        ]
        if self._reference is not None:
            parts.append((REFERENCE, list(self._reference.items())))
        saving = None
        if self._rank == 0:
            num_bytes = sum(
                tensor.numel() * tensor.element_size() for _, tensors in parts for _, tensor in tensors
            )
            saving = _Saving(self._checkpoints, self.version, self.config_digest, num_bytes)
        for part, tensors in parts:
            gathered = {}
            for name, tensor in tensors:
                full = fsdp.full_tensor(tensor)
                if saving is not None:
                    gathered[name] = full.cpu()
            if saving is not None:
                saving.add(part, gathered)
        return saving is None or saving.finish()


class _Saving:
    """The writer's side of a save. A failure is kept to the end: the other ranks expect all the gathers."""

    def __init__(self, store: CheckpointStore, version: Version, config_digest: str, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._store = store
        self._version = version
        self._config_digest = config_digest
        self._error: OSError | None = None
        self._do(self._begin)

    def _begin(self) -> None:
        self._store.prune()
        self._writer = self._store.writer(self._version.step, self._num_bytes)

    def add(self, part: str, tensors: dict[str, torch.Tensor]) -> None:
        self._do(lambda: self._writer.add(part, tensors))

    def finish(self) -> bool:
        self._do(lambda: self._writer.commit(self._version.lineage, self._config_digest))
        self._do(self._store.prune)
        if self._error is not None and self._error.errno in FULL:
            raise FinalError(self._full_disk(self._error))
        if self._error is not None:
            log.error("the checkpoint of version %s was not written: %s", self._version, self._error)
        return self._error is None

    def _full_disk(self, error: OSError) -> str:
        kept = self._store.steps()
        last = f"the checkpoint of step {kept[-1]} is whole" if kept else "there is no earlier one"
        return (
            f"no room for the checkpoint of step {self._version.step} in {self._store.root}: {error.strerror}; {last}; "
            "make room there, then resume the run"
        )

    def _do(self, work: Callable[[], None]) -> None:
        if self._error is None:
            try:
                work()
            except OSError as error:
                self._error = error


def checkpoint_root(run_dir: Path) -> Path:
    return run_dir / "checkpoints"
