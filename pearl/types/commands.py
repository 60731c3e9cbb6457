"""What the core asks for: a closed union of tagged values. A command with an ``op`` is answered by an event that
echoes it; the others are done at once and need no answer.

Commands name trajectories and lengths; whoever performs them attaches token ids from the token store.
"""

import msgspec

from pearl.types.ids import AttemptId, GpuId, Incarnation, OpId, Slot, TrajectoryId
from pearl.types.reports import AnyReport
from pearl.types.trajectory import TrajectoryRecord
from pearl.types.weights import UpdateMode, Version


class Command(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all commands."""


class StartWorker(Command, frozen=True):
    """-> WorkerReady | WorkerLost. Also makes the log directory of the incarnation."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    role: str
    gpus: tuple[GpuId, ...]


class StopWorker(Command, frozen=True):
    """End it with all its descendants -> WorkerLost (also when it is gone already). Grace 0 kills at once."""

    slot: Slot
    incarnation: Incarnation
    grace_s: float
    reason: str


class UpdateWeights(Command, frozen=True):
    """Bring the published ``version`` to the worker -> WeightsVerified | WeightsFailed (or WorkerLost)."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    version: Version
    mode: UpdateMode


class SetRole(Command, frozen=True):
    """Have the drained worker serve in another role -> RoleSet | WorkerLost."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    role: str


class Generate(Command, frozen=True):
    """Continue the trajectory's first ``context_tokens`` tokens -> deltas of ``attempt`` in TokensStreamed."""

    attempt: AttemptId
    trajectory: TrajectoryId
    turn: int
    slot: Slot
    incarnation: Incarnation
    context_tokens: int
    max_new_tokens: int
    greedy: bool
    prefill_slot: Slot | None = None  # of a pair: that worker prefills, ``slot`` decodes
    prefill_incarnation: Incarnation = Incarnation(0)


class Abort(Command, frozen=True):
    """-> a last delta with finish = "abort" (or the finish it met before). Unknown attempts are ignored."""

    attempt: AttemptId
    slot: Slot
    incarnation: Incarnation


class OpenEpisode(Command, frozen=True):
    """Open the environment; with ``turns`` > 0 replay that many turns from the token store into it.
    -> EpisodeOpened | EpisodeFailed"""

    op: OpId
    trajectory: TrajectoryId
    evaluation: bool
    task: int
    turns: int


class StepEpisode(Command, frozen=True):
    """Give the tokens of ``turn`` to the environment -> EpisodeStepped | EpisodeFailed. The observation's ids are
    appended to the token store before the event."""

    op: OpId
    trajectory: TrajectoryId
    turn: int
    truncated: bool


class CloseEpisode(Command, frozen=True):
    trajectory: TrajectoryId


class VoidTokens(Command, frozen=True):
    """All tokens of the trajectory so far are void (it starts again)."""

    trajectory: TrajectoryId


class TruncateTokens(Command, frozen=True):
    """Keep the first ``tokens``: what was stored but not journalled before a crash never happened."""

    trajectory: TrajectoryId
    tokens: int


class ForgetTokens(Command, frozen=True):
    """Trained and checkpointed, or evaluated: the ids are needed no more."""

    trajectory: TrajectoryId


class StartTrainer(Command, frozen=True):
    """-> TrainerReady | TrainerLost. ``restore_step`` None = fresh weights and warm start."""

    op: OpId
    incarnation: Incarnation
    lineage: int
    restore_step: int | None


class TrainSample(msgspec.Struct, frozen=True, array_like=True):
    trajectory: TrajectoryId
    group: int
    reward: float
    masked: bool
    tokens: int


class Train(Command, frozen=True):
    """Step ``step``: train version ``step`` into ``step + 1`` on exactly these -> TrainFinished | TrainerLost."""

    op: OpId
    incarnation: Incarnation
    step: int
    samples: tuple[TrainSample, ...]
    checkpoint: bool


class Interrupt(Command, frozen=True):
    """Have the worker abort every attempt it has -> a last delta each, with what was made."""

    slot: Slot
    incarnation: Incarnation


class ReleaseWorker(Command, frozen=True):
    """Interrupt all attempts, cancel an activation under way, let go of all device memory, keep the process
    -> WorkerReleased, within ``limit_s`` or the worker is killed (-> WorkerLost)."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    limit_s: float


class ActivateWorker(Command, frozen=True):
    """Take device memory for weights, load and prove the published ``version``, take memory for KV
    -> WeightsVerified | WeightsFailed (or WorkerLost)."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    version: Version


class OffloadTraining(Command, frozen=True):
    """Move the idle training world's state off its devices -> TrainingOffloaded | TrainerLost."""

    op: OpId
    incarnation: Incarnation


class RestoreTraining(Command, frozen=True):
    """Bring it back, bit-identical -> TrainingRestored | TrainerLost."""

    op: OpId
    incarnation: Incarnation


class ReturnGpus(Command, frozen=True):
    """Nothing of the run uses these preemptible GPUs any more: tell their host's agent and whoever reclaimed them."""

    gpus: tuple[GpuId, ...]
    seconds: float  # since the reclaim


class AnswerPreempt(Command, frozen=True):
    """Answer a PreemptRequested: the GPUs that arrive or are reclaimed, or what is wrong."""

    request: int
    gpus: tuple[GpuId, ...]
    error: str = ""


class StopTrainer(Command, frozen=True):
    incarnation: Incarnation
    grace_s: float
    reason: str


class RecordTrajectory(Command, frozen=True):
    """Append a line to trajectories.jsonl."""

    record: TrajectoryRecord


class Report(Command, frozen=True):
    """Append a line to metrics.jsonl and show it to the person."""

    report: AnyReport


class Finish(Command, frozen=True):
    """The run is over: write summary.json from ``summary`` and stop everything. ``error`` "" = as wished."""

    summary: dict[str, int | float | str | bool | list[list[int]] | None]
    error: str
    exit_code: int


AnyCommand = (
    StartWorker
    | StopWorker
    | UpdateWeights
    | Generate
    | Abort
    | OpenEpisode
    | StepEpisode
    | CloseEpisode
    | VoidTokens
    | TruncateTokens
    | ForgetTokens
    | StartTrainer
    | Train
    | Interrupt
    | SetRole
    | ReleaseWorker
    | ActivateWorker
    | OffloadTraining
    | RestoreTraining
    | ReturnGpus
    | AnswerPreempt
    | StopTrainer
    | RecordTrajectory
    | Report
    | Finish
)
