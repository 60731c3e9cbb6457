"""What may lie in the coordinator's mailbox: events, and what still has token ids to leave on its way to be one."""

from typing import NamedTuple

from pearl.coordinator.mailbox import Mailbox
from pearl.state.events import AnyEvent, EpisodeOpened, EpisodeStepped
from pearl.state.ids import Incarnation, Slot
from pearl.state.messages.rollout import Deltas


class Frame(NamedTuple):
    """A rollout worker's frame, as it came."""

    slot: Slot
    incarnation: Incarnation
    deltas: Deltas


class Observed(NamedTuple):
    """An environment's answer with the ids it brought: a first prompt or an observation."""

    event: EpisodeOpened | EpisodeStepped
    turn: int
    ids: bytes


Item = AnyEvent | Frame | Observed
Inbox = Mailbox[Item]
