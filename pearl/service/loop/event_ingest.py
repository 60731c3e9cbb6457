"""The last step before the core: token ids go to the token store, what cannot be right is turned into a failure, and
a request for GPUs learns on which hosts they could be.

It runs right before the core handles the event, in the mailbox's order, so that the store never holds a token that
the core does not count, nor misses one that it does.
"""

import logging
from collections.abc import Callable, Collection

import msgspec

from pearl.runtime.clock import Clock
from pearl.runtime.rate_limited_log import RateLimitedLogger
from pearl.runtime.token_store import TokenStore
from pearl.service.clients.environment_pool import EnvironmentPool
from pearl.service.loop.inbox import EnvironmentResult, Item, TokenFrame
from pearl.service.loop.token_ingest import BrokenFrameError, TokenIngest
from pearl.types import events
from pearl.types.ids import AttemptId, Incarnation, Slot
from pearl.types.messages.environment import MAX_REWARD, EnvironmentFailure

log = logging.getLogger(__name__)


class EventIngest:
    def __init__(
        self,
        store: TokenStore,
        tokens: TokenIngest,
        environments: EnvironmentPool,
        hosts: Callable[[], Collection[str]],
        vocabulary_size: int,
        clock: Clock,
        terminate: Callable[[Slot, Incarnation, str], None],
        abort: Callable[[Slot, Incarnation, AttemptId], None],
    ) -> None:
        """``hosts`` returns those on which something could be started now."""
        self._store = store
        self._tokens = tokens
        self._environments = environments
        self._hosts = hosts
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self._error_log = RateLimitedLogger(log, period_s=5.0)
        self._terminate = terminate
        self._abort = abort

    def to_event(self, item: Item) -> events.AnyEvent | None:
        """The event for the core; None when there is none in it."""
        if isinstance(item, TokenFrame):
            return self._frame(item)
        if isinstance(item, EnvironmentResult):
            return self._observed(item)
        if isinstance(item, events.PreemptRequested):
            return msgspec.structs.replace(item, hosts=tuple(sorted(self._hosts())))
        if isinstance(item, events.WorkerLost):
            self._tokens.close_worker(item.slot, item.incarnation)
        return item

    def _frame(self, frame: TokenFrame) -> events.TokensStreamed | None:
        try:
            event, ended = self._tokens.take(*frame)
        except BrokenFrameError as error:
            self._tokens.close_worker(frame.slot, frame.incarnation)
            self._terminate(frame.slot, frame.incarnation, f"broke the protocol: {error}")
            return None
        for attempt in ended:
            self._abort(frame.slot, frame.incarnation, attempt)
        if event is not None:
            self._log_errors(event)
        return event

    def _log_errors(self, event: events.TokensStreamed) -> None:
        for delta in event.deltas:
            if delta.finish == "error":
                now, name = self._clock.now(), f"rollout.{event.slot}.{event.incarnation}"
                self._error_log.warning(now, "%s: attempt %d failed: %s", name, delta.attempt, delta.error)

    def _observed(self, item: EnvironmentResult) -> events.AnyEvent:
        event = item.event
        if not self._environments.is_awaited(event.trajectory, event.op):
            return event  # taken back meanwhile: the core counts it as stale
        if not _are_ids(item.ids, self._vocabulary_size):
            return self._refused(item, "error", f"ids outside the vocabulary of {self._vocabulary_size}")
        if isinstance(event, events.EpisodeStepped):
            if not abs(event.reward) <= MAX_REWARD:  # NaN included
                return self._refused(
                    item, "error", f"a reward of {event.reward:g}, magnitudes go up to {MAX_REWARD:g}"
                )
            self._store.append(event.trajectory, "observation", item.turn, item.ids)
            return event
        if not item.ids:
            return self._refused(item, "error", "the first prompt is empty")
        if self._store.length(event.trajectory) == 0:
            self._store.append(event.trajectory, "prompt", 0, item.ids)
        elif self._store.view(event.trajectory).prompt != item.ids:
            return self._refused(item, "mismatch", "the replayed episode has another first prompt")
        return event

    def _refused(
        self, item: EnvironmentResult, kind: EnvironmentFailure, reason: str
    ) -> events.EpisodeFailed:
        log.warning("episode %d: %s: %s", item.event.trajectory, kind, reason)
        self._environments.close(item.event.trajectory)
        return events.EpisodeFailed(item.event.op, item.event.trajectory, kind, reason)


def _are_ids(packed: bytes, vocabulary_size: int) -> bool:
    if len(packed) % 4:
        return False
    ids = memoryview(packed).cast("i")
    return not ids or (min(ids) >= 0 and max(ids) < vocabulary_size)
