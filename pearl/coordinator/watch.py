"""Condemns peers that are silent or stuck, and knows how well the coordinator itself was running meanwhile."""

import asyncio
import logging
from collections.abc import Callable

from pearl.runtime.clock import Clock
from pearl.runtime.hub import Hub, PeerGoneError
from pearl.runtime.limited_log import LimitedLog
from pearl.runtime.liveness import Limits, Liveness
from pearl.state.config import RuntimeConfig
from pearl.state.messages.control import Heartbeat

log = logging.getLogger(__name__)

LAG_WORTH_SAYING_S = 0.5
Condemn = Callable[[str], None]


class Watch:
    def __init__(self, hub: Hub, runtime: RuntimeConfig, clock: Clock) -> None:
        """``clock`` is the hub's own, so that their times can be compared."""
        self._hub = hub
        self._clock = clock
        self._period_s = runtime.heartbeat_period_s
        limits = Limits(
            runtime.heartbeat_period_s,
            runtime.heartbeat_timeout_s,
            runtime.progress_timeout_s,
            runtime.start_timeout_s,
        )
        self._liveness = Liveness(limits, clock.now())
        self._condemn: dict[str, Condemn] = {}
        self._lag = LimitedLog(log)

    def add(self, peer: str, condemn: Condemn) -> None:
        """Watch a peer that has said hello; ``condemn`` gets the reason, perhaps more than once."""
        self._condemn[peer] = condemn
        self._liveness.add(peer, self._clock.now(), ready=True)

    def remove(self, peer: str) -> None:
        self._condemn.pop(peer, None)
        self._liveness.remove(peer)

    def beat(self, peer: str, heartbeat: Heartbeat) -> None:
        self._liveness.beat(peer, heartbeat, self._clock.now())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            self.look()

    def look(self) -> None:
        """Judge once; to be called every heartbeat period."""
        now = self._clock.now()
        for peer in self._condemn:
            try:
                self._liveness.heard(peer, self._hub.last_heard(peer))
            except PeerGoneError:
                continue  # dropped; its task is about to remove it here
        before = self._liveness.asleep_s
        verdicts = self._liveness.judge(now, self._hub.deaf_s)
        lag_s = self._liveness.asleep_s - before
        if lag_s > LAG_WORTH_SAYING_S:
            self._lag.warning(
                now, "the coordinator itself stood still for %.1f s; held against nobody", lag_s
            )
        for verdict in verdicts:
            log.warning("%s is %s: %s", verdict.peer, verdict.state, verdict.reason)
            self._condemn[verdict.peer](verdict.reason)
