"""Condemns peers that are silent or stuck, and knows how well the coordinator itself was running meanwhile."""

import asyncio
import logging
from collections.abc import Callable

from pearl.runtime.clock import Clock
from pearl.runtime.errors import PeerGoneError
from pearl.runtime.liveness import Limits, Liveness
from pearl.runtime.rate_limited_log import RateLimitedLogger
from pearl.runtime.rpc_server import RpcServer
from pearl.types.config import RuntimeConfig
from pearl.types.messages.control import Heartbeat

log = logging.getLogger(__name__)

LAG_WORTH_SAYING_S = 0.5
Terminate = Callable[[str], None]


class LivenessMonitor:
    def __init__(self, server: RpcServer, runtime: RuntimeConfig, clock: Clock) -> None:
        """``clock`` is the server's own, so that their times can be compared."""
        self._server = server
        self._clock = clock
        self._period_s = runtime.heartbeat_period_s
        limits = Limits(
            runtime.heartbeat_period_s,
            runtime.heartbeat_timeout_s,
            runtime.progress_timeout_s,
            runtime.start_timeout_s,
        )
        self._liveness = Liveness(limits, clock.now())
        self._terminate: dict[str, Terminate] = {}
        self._lag = RateLimitedLogger(log)

    def add(self, peer: str, terminate: Terminate) -> None:
        """Watch a peer that has said hello; ``terminate`` gets the reason, perhaps more than once."""
        self._terminate[peer] = terminate
        self._liveness.add(peer, self._clock.now(), ready=True)

    def remove(self, peer: str) -> None:
        self._terminate.pop(peer, None)
        self._liveness.remove(peer)

    def beat(self, peer: str, heartbeat: Heartbeat) -> None:
        self._liveness.beat(peer, heartbeat, self._clock.now())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            self.check()

    def check(self) -> None:
        """Judge once; to be called every heartbeat period."""
        now = self._clock.now()
        for peer in self._terminate:
            try:
                self._liveness.heard(peer, self._server.last_heard(peer))
            except PeerGoneError:
                continue  # dropped; its task is about to remove it here
        before = self._liveness.asleep_s
        health = self._liveness.check(now, self._server.paused_s)
        lag_s = self._liveness.asleep_s - before
        if lag_s > LAG_WORTH_SAYING_S:
            self._lag.warning(
                now, "the coordinator itself stood still for %.1f s; held against nobody", lag_s
            )
        for peer_health in health:
            log.warning("%s is %s: %s", peer_health.peer, peer_health.state, peer_health.reason)
            self._terminate[peer_health.peer](peer_health.reason)
