"""What can happen to the core: a closed union of tagged values, journalled as they are.

Outcomes echo the ``op`` of the command they answer; an outcome whose op is no longer awaited, or that names an
old incarnation, is dropped and counted.
"""

import msgspec

from pearl.types.comparison import ComparedPart, Comparison
from pearl.types.ids import GpuId, Incarnation, OpId, Slot, TrajectoryId
from pearl.types.messages.environment import EnvironmentFailure
from pearl.types.profile import IterationSums
from pearl.types.trace import Action
from pearl.types.trajectory import TokenDelta
from pearl.types.weights import Version


class Event(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all events."""


class Started(Event, frozen=True):
    """First event of a new run."""

    num_train_tasks: int  # 0 = unbounded
    num_evaluation_tasks: int
    can_restore: bool
    reserved: tuple[GpuId, ...] = ()  # GPUs of reserved hosts, as many as the job awaits


class Resumed(Event, frozen=True):
    """First event after the coordinator came back from its journal: every process of the former life is gone."""

    reserved: tuple[GpuId, ...] = ()


class StopRequested(Event, frozen=True):
    signal: int  # 2 or 15


class Tick(Event, frozen=True):
    """The time of ``Coordinator.next_wakeup()`` has come."""


class WorkerReady(Event, frozen=True):
    """The process runs and its engine could take weights; it holds no verified ones yet."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    host: str
    pid: int


class WorkerLost(Event, frozen=True):
    """The worker is gone (exited, silent, stuck, failed to start) and nothing of it runs any more."""

    slot: Slot
    incarnation: Incarnation
    reason: str
    produced_tokens: int | None = None  # tokens it ever sampled, when its counter could be read
    is_final: bool = False  # no other life of it on this host could do better


class WeightsVerified(Event, frozen=True):
    """The worker loaded ``version`` and reports its checksum; the outcome of ``op``."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    version: Version
    checksum: str
    seconds: float
    parts: dict[str, float] = {}  # seconds of each stage, for people


class WeightsFailed(Event, frozen=True):
    op: OpId
    slot: Slot
    incarnation: Incarnation
    reason: str
    superseded: bool = False  # the source has a newer version, of which we will hear


class RoleSet(Event, frozen=True):
    """The worker serves in the role asked for, its KV forgotten. A refusal or failure is a WorkerLost: a worker in
    doubt is replaced."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    seconds: float


class TokensStreamed(Event, frozen=True):
    """One frame of a worker. The ids are already in the token store."""

    slot: Slot
    incarnation: Incarnation
    deltas: tuple[TokenDelta, ...]
    iterations: IterationSums | None = None  # of the engine since its last frame


class EpisodeOpened(Event, frozen=True):
    op: OpId
    trajectory: TrajectoryId
    prompt_tokens: int  # of a fresh episode; a restored one has the tokens it had
    seconds: float


class EpisodeStepped(Event, frozen=True):
    op: OpId
    trajectory: TrajectoryId
    observation_tokens: int
    reward: float
    done: bool
    seconds: float


class EpisodeFailed(Event, frozen=True):
    op: OpId
    trajectory: TrajectoryId
    kind: EnvironmentFailure
    reason: str
    charged: bool = (
        True  # False: the worker died through no fault of this trajectory, which counts against no limit
    )


class TrainerReady(Event, frozen=True):
    op: OpId
    incarnation: Incarnation
    version: Version
    checksum: str


class Compared(Event, frozen=True):
    """A part of the run was compared with plain ``transformers``, or was to be. It comes before TrainerReady or the
    worker's WeightsVerified."""

    part: ComparedPart
    comparison: Comparison
    slot: Slot | None = None  # of the worker whose engine it was
    incarnation: Incarnation = Incarnation(0)


class TrainFinished(Event, frozen=True):
    op: OpId
    incarnation: Incarnation
    version: Version
    checksum: str
    checkpoint_step: int | None
    metrics: dict[str, float]
    max_logprob_gap: float
    logprob_gap_tokens: int


class TrainerLost(Event, frozen=True):
    incarnation: Incarnation
    reason: str
    is_final: bool = False  # no other life of it could do better


class PreemptRequested(Event, frozen=True):
    """A person or a trace asks to add or reclaim GPUs, by name or by count; answered by AnswerPreempt, all or
    nothing."""

    request: int  # its number, echoed in the answer
    action: Action
    gpus: tuple[GpuId, ...]
    count: int
    grace_s: float  # of a reclaim
    hosts: tuple[str, ...] = ()  # on which something can be started now
    reason: str = "asked for"


class GpusArrived(Event, frozen=True):
    """Preemptible GPUs of a host can be used from now on. Those that are there already change nothing."""

    gpus: tuple[GpuId, ...]
    reserved: bool = False  # the GPUs of a reserved host instead, for the job's own workers that lost theirs


class GpusReclaimed(Event, frozen=True):
    """Preemptible GPUs must be given back within the grace; those that are not there have been already."""

    gpus: tuple[GpuId, ...]
    grace_s: float
    reason: str


class HostLost(Event, frozen=True):
    """The host's agent is gone and with it all its processes, whose WorkerLost come by themselves."""

    host: str
    reason: str


class WorkerReleased(Event, frozen=True):
    """An overlap worker holds no device memory any more (verified) and runs nothing; its process lives."""

    op: OpId
    slot: Slot
    incarnation: Incarnation
    seconds: float
    parts: dict[str, float] = {}


class TrainingOffloaded(Event, frozen=True):
    """The training state has left its devices; the freed memory is verified."""

    op: OpId
    incarnation: Incarnation
    seconds: float
    parts: dict[str, float] = {}


class TrainingRestored(Event, frozen=True):
    """The training state is back, bit-identical."""

    op: OpId
    incarnation: Incarnation
    seconds: float
    parts: dict[str, float] = {}


AnyEvent = (
    Started
    | Resumed
    | StopRequested
    | Tick
    | WorkerReady
    | WorkerLost
    | WeightsVerified
    | WeightsFailed
    | TokensStreamed
    | EpisodeOpened
    | EpisodeStepped
    | EpisodeFailed
    | TrainerReady
    | Compared
    | TrainFinished
    | TrainerLost
    | PreemptRequested
    | GpusArrived
    | GpusReclaimed
    | HostLost
    | WorkerReleased
    | RoleSet
    | TrainingOffloaded
    | TrainingRestored
)
