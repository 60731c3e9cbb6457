"""What may lie in the coordinator's mailbox: events, and what becomes one when it is its turn."""

from typing import NamedTuple

from pearl.service.loop.mailbox import Mailbox
from pearl.types.events import AnyEvent, EpisodeOpened, EpisodeStepped
from pearl.types.ids import Incarnation, Slot
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


Item = AnyEvent | TokenFrame | EnvironmentResult
Inbox = Mailbox[Item]
