"""What may lie in the coordinator's mailbox: events, and what becomes one when it is its turn."""

from collections.abc import Callable
from typing import NamedTuple

from pearl.service.loop.mailbox import Mailbox
from pearl.types.events import AnyEvent, EpisodeOpened, EpisodeStepped, GpusReclaimed
from pearl.types.ids import GpuId, Incarnation, Slot
from pearl.types.messages.control import Preempt
from pearl.types.messages.rollout import Deltas


class TokenFrame(NamedTuple):
    """A rollout worker's frame, as it came."""

    slot: Slot
    incarnation: Incarnation
    deltas: Deltas


class EnvironmentResult(NamedTuple):
    """An environment's answer with the ids it brought: a first prompt or an observation."""

    event: EpisodeOpened | EpisodeStepped
    turn: int
    ids: bytes


class PreemptRequested(NamedTuple):
    """An arrival or a reclaim from outside. Its GPUs are chosen when it is its turn, by what the core knows then, and
    one of the two is called at once."""

    request: Preempt
    accept: Callable[[tuple[GpuId, ...]], None]
    refuse: Callable[[ValueError], None]


class HostNotice(NamedTuple):
    """A host is about to be taken away. ``returned`` is called at once with those of its GPUs that are not used."""

    event: GpusReclaimed
    returned: Callable[[tuple[GpuId, ...]], None]


Item = AnyEvent | TokenFrame | EnvironmentResult | PreemptRequested | HostNotice
Inbox = Mailbox[Item]
