"""Who is alive, who is stuck and who is dead, judged only by what was heard while one listened. Pure.

The judge looks on a fixed period. When it comes late, or was deaf because its queue was full, it slept itself: that
time is held against nobody, because the others' words were still in the socket.
"""

from typing import Literal, NamedTuple

import msgspec

from pearl.types.messages.control import Heartbeat

State = Literal["alive", "stuck", "dead"]


class LoopLag:
    """How much of the time between two looks the looker was asleep."""

    def __init__(self, period_s: float, now: float) -> None:
        self._period_s = period_s
        self._looked_at = now
        self._deaf_s = 0.0

    def measure(self, now: float, paused_s: float = 0.0) -> float:
        """Call every period. ``paused_s`` is the time, since the start, in which nothing was read though awake.

        Returns the seconds since the last look that count for nobody; a tenth of a second late is no sleep.
        """
        gap = max(now - self._looked_at, 0.0)
        late = gap - self._period_s
        asleep = min(max(late if late > 0.1 else 0.0, paused_s - self._deaf_s), gap)
        self._looked_at, self._deaf_s = now, paused_s
        return asleep


class IdleTimer:
    """Seconds without a word from one side, without those in which the listener was asleep."""

    def __init__(self, now: float) -> None:
        self._since = now

    def heard(self, at: float) -> None:
        """An older word changes nothing."""
        self._since = max(self._since, at)

    def excuse(self, now: float, asleep_s: float) -> None:
        """The listener slept for so long just before ``now``; what was heard since then stays as it is."""
        self._since += min(asleep_s, max(now - self._since, 0.0))

    def seconds(self, now: float) -> float:
        return max(now - self._since, 0.0)


class Limits(NamedTuple):
    """Seconds; from the job's runtime section."""

    heartbeat_period_s: float  # also how often the judge looks
    heartbeat_timeout_s: float  # silent for longer = dead
    progress_timeout_s: float  # has work, is not busy, makes no progress for longer = stuck
    start_timeout_s: float  # not ready for longer = stuck, busy or not


class PeerHealth(NamedTuple):
    peer: str
    state: State
    reason: str


class _Peer(msgspec.Struct, eq=False):
    started: IdleTimer
    word: IdleTimer
    progress: IdleTimer
    last: Heartbeat | None = None
    ready: bool = False


class Liveness:
    """Judges a set of peers. All times are monotonic seconds of one clock."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._loop_lag = LoopLag(limits.heartbeat_period_s, now)
        self._peers: dict[str, _Peer] = {}
        self.asleep_s = 0.0  # how long the judge itself slept, in all

    def add(self, peer: str, now: float, *, ready: bool = False) -> None:
        """Watch a peer from now on; unless ``ready``, the limit of a start holds until ``ready()`` is called."""
        self._peers[peer] = _Peer(IdleTimer(now), IdleTimer(now), IdleTimer(now), ready=ready)

    def ready(self, peer: str) -> None:
        """Note that a peer has started: the limit of a start is over."""
        self._peers[peer].ready = True

    def remove(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def heard(self, peer: str, at: float) -> None:
        """Something came from it; peers that are not watched are ignored."""
        if peer in self._peers:
            self._peers[peer].word.heard(at)

    def beat(self, peer: str, heartbeat: Heartbeat, at: float) -> None:
        self.heard(peer, at)
        known = self._peers.get(peer)
        if known is None:
            return
        moved = known.last is None or heartbeat.progress != known.last.progress
        if moved or heartbeat.busy or not heartbeat.pending:
            known.progress.heard(at)
        known.last = heartbeat

    def check(self, now: float, paused_s: float = 0.0) -> list[PeerHealth]:
        """Call every heartbeat period; ``paused_s`` as in ``RpcServer.paused_s``. Returns those that are not alive."""
        asleep_s = self._loop_lag.measure(now, paused_s)
        self.asleep_s += asleep_s
        self._excuse(now, asleep_s)
        health = (self.state(peer, now) for peer in self._peers)
        return [health for health in health if health.state != "alive"]

    def _excuse(self, now: float, asleep_s: float) -> None:
        for known in self._peers.values():
            for silence in (known.started, known.word, known.progress):
                silence.excuse(now, asleep_s)

    def state(self, peer: str, now: float) -> PeerHealth:
        known, limits = self._peers[peer], self._limits
        silent = known.word.seconds(now)
        if silent > limits.heartbeat_timeout_s:
            limit = f"runtime.heartbeat_timeout_s = {limits.heartbeat_timeout_s:g}"
            return PeerHealth(peer, "dead", f"silent for {silent:.1f} s, {limit}")
        starting = known.started.seconds(now)
        if not known.ready and starting > limits.start_timeout_s:
            doing = f" ({known.last.busy})" if known.last is not None and known.last.busy else ""
            limit = f"runtime.start_timeout_s = {limits.start_timeout_s:g}"
            return PeerHealth(peer, "stuck", f"not ready after {starting:.1f} s{doing}, {limit}")
        if known.last is None or known.last.busy or not known.last.pending:
            return PeerHealth(peer, "alive", "")
        still = known.progress.seconds(now)
        if still > limits.progress_timeout_s:
            reason = f"{known.last.pending} pending, no progress for {still:.1f} s"
            limit = f"runtime.progress_timeout_s = {limits.progress_timeout_s:g}"
            return PeerHealth(peer, "stuck", f"{reason}, {limit}")
        return PeerHealth(peer, "alive", "")
