"""What each kind of peer may say to the coordinator, and how large: anything else is refused before it is read."""

from typing import Any, NamedTuple

from pearl.types.messages.control import (
    AgentReport,
    GroupExited,
    Heartbeat,
    Leaving,
    Notice,
    PeerKind,
    Preempt,
    StartGroupReply,
    StatusRequest,
    StopGroupReply,
)
from pearl.types.messages.environment import (
    DecodeTokensReply,
    DemonstrateReply,
    DescribeReply,
    EpisodeFailed,
    OpenEpisodeReply,
    StepEpisodeReply,
)
from pearl.types.messages.rollout import (
    ActivateReply,
    Deltas,
    ReleaseReply,
    SetRoleReply,
    UpdateWeightsReply,
)
from pearl.types.messages.training import OffloadReply, RestoreReply, StartTrainingReply, TrainStepReply


class Sender(NamedTuple):
    messages: Any
    """Union of the types; Hello and Ack may be sent by all."""
    max_bytes: int | None = None
    """Of a frame; None: as any frame may have."""


SENDERS: dict[PeerKind, Sender] = {
    "agent": Sender(
        Heartbeat | AgentReport | Notice | Leaving | GroupExited | StartGroupReply | StopGroupReply, 4 << 20
    ),
    "rollout": Sender(Heartbeat | Deltas | UpdateWeightsReply | SetRoleReply | ReleaseReply | ActivateReply),
    "training": Sender(Heartbeat | StartTrainingReply | TrainStepReply | OffloadReply | RestoreReply),
    "environment": Sender(
        Heartbeat
        | OpenEpisodeReply
        | StepEpisodeReply
        | EpisodeFailed
        | DemonstrateReply
        | DescribeReply
        | DecodeTokensReply
    ),
    "admin": Sender(Heartbeat | StatusRequest | Preempt, 4 << 20),
}
