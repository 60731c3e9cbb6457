"""Messages every peer speaks: hello, heartbeat, shutdown, and those of the node agent."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_HOST_GPUS = 1024
"""Of one host: what says that it has more is mistaken."""
MAX_RUN_GPUS = 1 << 16
"""Of all hosts of a run."""
Name = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

PeerKind = Literal["agent", "rollout", "training", "environment", "admin"]


class Installation(msgspec.Struct, frozen=True):
    """What a process computes with. All hosts of a run must have the same."""

    sources: str  # digest of PEARL's own
    versions: dict[str, str]  # of Python and of packages; "" = not installed
    model: str = ""  # digest of the model's files; "" = its directory is not known there


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a peer; nothing is sent to it before. Its identity is ``kind.slot.incarnation``."""

    kind: PeerKind
    slot: Count
    incarnation: Count
    host: Name
    pid: Count
    run_id: Name  # refused when it is not this run's; agents and admins that know no run leave it empty
    kv_address: Name = ""  # where a rollout worker takes KV, to be named as ``pair``; "" = it takes none
    installation: Installation | None = None  # of agents and workers


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to a hello."""

    run_id: str
    model_path: str = ""  # of the job: an agent of another host then reports what it has there


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent on a fixed period by the peer's own loop.

    ``progress`` grows whenever real work is done: alive but without progress while it has work is stuck.
    A non-empty ``busy`` (compiling, warming up, loading) suspends the progress check, not the liveness check.
    """

    progress: int
    busy: str = ""
    pending: int = 0  # requests or commands the peer has not finished


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing new, release everything, exit 0."""

    reason: str


class Gpu(msgspec.Struct, frozen=True, array_like=True):
    gpu: Name  # host/index
    memory_bytes: Count
    virtual: bool


HostPool = Literal["local", "rollout", "spot"]
"""Of a host: the coordinator's own; reserved for rollout, so that its loss is a failure; or preemptible."""


class AgentReport(msgspec.Struct, frozen=True, tag=True):
    """What a node agent's host offers, once after its hello: told by the agent of the coordinator's own host, asked by
    one of another host, whose answer is an Ack or an error that says why it is not taken."""

    host: Name
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=MAX_HOST_GPUS)]
    memory_bytes: Count
    pool: HostPool = "local"
    model: str = ""  # digest of the job's model files there


class Notice(msgspec.Struct, frozen=True, tag=True):
    """An agent announces that its host will be taken away: the run must be off it within the grace."""

    grace_s: Annotated[float, Meta(ge=0, le=86_400)]
    reason: str


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The last word of an agent of another host: its groups have ended, and so will it in a moment."""

    reason: str


class GpusReturned(msgspec.Struct, frozen=True, tag=True):
    """The coordinator confirms to an agent that nothing of the run uses these GPUs of its host any more."""

    gpus: tuple[str, ...]


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """From ``pearl preempt``: inject an arrival or a reclaim. Either ids, or a count of which the coordinator picks
    the ids (arrivals: absent GPUs in order; reclaims: present ones, newest first). Answered with PreemptReply at once
    or an error that says what is wrong; nothing is done in part."""

    action: Literal["arrive", "reclaim"]
    gpus: Annotated[tuple[Name, ...], Meta(max_length=MAX_RUN_GPUS)] = ()
    count: Annotated[int, Meta(ge=0, le=MAX_RUN_GPUS)] = 0
    grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0


class PreemptReply(msgspec.Struct, frozen=True, tag=True):
    gpus: tuple[str, ...]  # that arrive or are reclaimed


COORDINATOR_PLACEHOLDER = "{coordinator}"
DIRECTORY_PLACEHOLDER = "{directory}"


class StartGroup(msgspec.Struct, frozen=True, tag=True):
    """Start processes as one fault domain: a torchrun group, or one plain process (``num_processes=0``).

    In its arguments "{coordinator}" stands for the address at which its agent reaches the coordinator, "{directory}"
    for the directory of its logs and ``files``; an agent on whose host ``log_directory`` is not there chooses one.
    """

    group: str  # unique within the run, e.g. "rollout.1.3"
    module: str  # python -m MODULE
    arguments: tuple[str, ...]
    environment: dict[str, str]
    num_processes: int  # processes under torchrun; 0 = one plain process
    log_directory: str
    shutdown_grace_s: float = 5.0
    files: dict[str, bytes] = {}  # written into its directory before it starts
    may_fork: bool = False  # its processes may be forked from the host's prepared process


class StartGroupReply(msgspec.Struct, frozen=True, tag=True):
    group: str
    pid: int  # of the launcher (torchrun agent or the process itself)


class StopGroup(msgspec.Struct, frozen=True, tag=True):
    """End a group with all its descendants: SIGTERM, then SIGKILL after the grace (0 = at once)."""

    group: str
    grace_s: float


class StopGroupReply(msgspec.Struct, frozen=True, tag=True):
    group: str
    exit_code: int | None


class GroupExited(msgspec.Struct, frozen=True, tag=True):
    """An agent reports that a process group has exited, planned or not; ``log_tail`` helps to say why."""

    group: str
    exit_code: int | None
    reason: str
    log_tail: str
    counter: int | None = None  # last value of its counter file (pearl.runtime.mmap_counter), if it kept one
    failure: str = ""  # the first error that ended a process of it, when there was one
    is_final: bool = False  # no later try could succeed


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """From ``pearl status``; answered with a StatusReply."""


class StatusReply(msgspec.Struct, frozen=True, tag=True):
    json: bytes  # what `pearl status --json` prints


class Ack(msgspec.Struct, frozen=True, tag=True):
    """An empty answer."""


ControlMessage = (
    Hello
    | Welcome
    | Heartbeat
    | Shutdown
    | AgentReport
    | StartGroup
    | StartGroupReply
    | StopGroup
    | StopGroupReply
    | GroupExited
    | StatusRequest
    | StatusReply
    | Ack
    | Notice
    | Leaving
    | GpusReturned
    | Preempt
    | PreemptReply
)
