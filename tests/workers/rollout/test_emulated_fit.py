"""What the tracker makes of a run of emulated engines: they know what they do, and it has to find that out.

The engines' own code on virtual time: iterations take the seconds that they say, environments theirs, KV none.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from random import Random

import msgspec
import numpy as np
import pytest
from test_emulated_core import prompt, request, settings, take

from pearl.core.elastic.runtime_tracker import (
    PlatformPriors,
    RuntimeTracker,
    TrackerState,
    TrajectorySample,
)
from pearl.service.loop.token_ingest import iteration_sums_of
from pearl.types.plan import Role
from pearl.types.trajectory import Turn
from pearl.workers.rollout.emulated.core import EmulatedCore
from pearl.workers.rollout.emulated.paired_requests import LAYOUT
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Granted, Landed, Ready
from pearl.workers.rollout.protocol import Delta

A_S, B_S, PREFILL_S, NOISE = 12e-3, 0.4e-3, 30e-6, 0.05
BATCH, STEPS = 24, 4
ENV_S = 0.8
PRIORS = PlatformPriors(10.0, 1e9, 1e12)


class Episode:
    def __init__(self, number: int, num_turns: int) -> None:
        self.number = number
        self.turns_left = num_turns
        self.ids = prompt(number, 200, 30)
        self.turns: list[Turn] = []
        self.sent_s = self.generate_s = 0.0
        self.new_prompt, self.prefilled, self.generated = len(self.ids), 0, 0


class Run:
    """Batches of episodes on one worker of each role."""

    def __init__(self, roles: tuple[Role, ...], seed: int) -> None:
        timing = {
            "decode_fixed_seconds": A_S,
            "decode_seconds_per_seq": B_S,
            "prefill_seconds_per_token": PREFILL_S,
            "noise": NOISE,
        }
        self.cores: dict[Role, EmulatedCore] = {}
        for slot, role in enumerate(roles):
            core = EmulatedCore(settings(timing=timing, seed=seed, slot=slot, kv_capacity_tokens=1 << 20))
            take(core, 1)
            core.set_role(role)
            self.cores[role] = core
        self.tracker = RuntimeTracker(TrackerState(), BATCH, 0.3, PRIORS)
        self.generating_s = self.live_s = 0.0
        """Sums over the time of how many episodes were with an engine, and how many were live."""
        self._rng = Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = self._num_episodes = 0
        self._passing: set[Role] = set()
        self._waiting: dict[Role, deque[Callable[[], None]]] = defaultdict(deque)
        """What an engine does between two iterations only."""
        self._episodes: dict[int, Episode] = {}
        self._samples: list[TrajectorySample] = []
        self._ready: set[int] = set()
        self._granted: set[int] = set()
        self._offered: set[int] = set()

    def step(self) -> None:
        self._samples = []
        for _ in range(BATCH):
            self._num_episodes += 1
            self._send(Episode(self._num_episodes, self._rng.randint(2, 8)))
        while self._events:
            self._advance()
        assert len(self._samples) == BATCH
        for role, core in self.cores.items():
            sums = iteration_sums_of(core.take_stats())
            assert sums is not None
            self.tracker.on_iterations(role, sums)
        self.tracker.on_step(self._samples)

    def _advance(self) -> None:
        at, _, action = heapq.heappop(self._events)
        generating = len(self._episodes)
        self.generating_s += generating * (at - self._now)
        self.live_s += (BATCH - len(self._samples)) * (at - self._now)
        self._now = at
        action()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + seconds, self._num_events, action))

    # an episode's turn

    def _send(self, episode: Episode) -> None:
        episode.sent_s = self._now
        self._episodes[episode.number] = episode
        whole = request(episode.number, episode.ids, seed=episode.number)
        for role in self.cores:
            pair = "" if role == "colocated" else "the other"
            self.cores[role].submit(msgspec.structs.replace(whole, pair=pair))
        self._go_on()

    def _answered(self, episode: Episode) -> None:
        del self._episodes[episode.number]
        episode.generate_s += self._now - episode.sent_s
        env_s = self._rng.uniform(0.5, 1.5) * ENV_S
        episode.turns.append(
            Turn(episode.new_prompt, episode.prefilled, episode.generated, episode.generated, env_s)
        )
        self._after(env_s, lambda: self._observed(episode))

    def _observed(self, episode: Episode) -> None:
        episode.turns_left -= 1
        if not episode.turns_left:
            self._samples.append(TrajectorySample(tuple(episode.turns), episode.generate_s))
            return
        observation = prompt(episode.number, self._rng.randint(50, 400), self._rng.randint(20, 60))
        episode.ids = np.append(episode.ids, observation).astype(np.int32)
        episode.new_prompt, episode.prefilled, episode.generated = len(observation), 0, 0
        self._send(episode)

    def _told(self, delta: Delta) -> None:
        episode = self._episodes[delta.attempt]
        episode.prefilled += delta.prefilled_tokens
        episode.generated += len(delta.ids)
        episode.ids = np.append(episode.ids, delta.ids).astype(np.int32)
        if delta.finish is not None:
            assert delta.finish == "stop", delta
            self._answered(episode)

    # the engines

    def _go_on(self) -> None:
        for role in self.cores:
            if role not in self._passing:
                self._between_iterations(role)

    def _between_iterations(self, role: Role) -> None:
        core, waiting = self.cores[role], self._waiting[role]
        while waiting:
            waiting.popleft()()
        self._report(core)
        seconds = core.begin() if core.has_work() else None
        self._listen(core)
        if seconds is not None:
            self._passing.add(role)
            self._after(seconds, lambda: self._ended(role))

    def _ended(self, role: Role) -> None:
        self._passing.discard(role)
        core = self.cores[role]
        core.end()
        self._listen(core)
        self._report(core)
        self._go_on()

    def _report(self, core: EmulatedCore) -> None:
        deltas, core.deltas = core.deltas, []
        for delta in deltas:
            self._told(delta)

    def _listen(self, core: EmulatedCore) -> None:
        """Between stages, as the transport would have it."""
        notices, core.stages.notices = core.stages.notices, []
        for notice in notices:
            match notice:
                case Ready(attempt, tokens, total):
                    if attempt not in self._offered:
                        self._offered.add(attempt)
                        self._offer(attempt, total)
                    if tokens == total:
                        self._ready.add(attempt)
                        self._hand_over(attempt, total)
                case Granted(attempt):
                    self._granted.add(attempt)
                    self._hand_over(attempt, len(self._episodes[attempt].ids) - 1)
                case Landed(attempt):
                    self._ready.discard(attempt)
                    self._granted.discard(attempt)
                    self._offered.discard(attempt)

    def _offer(self, attempt: int, total: int) -> None:
        decode, prefill = self.cores["decode"], self.cores["prefill"]
        assert prefill.version is not None
        offer = Offer(prefill.version, total, LAYOUT)
        self._later("decode", lambda: decode.kv_offered(attempt, offer))

    def _hand_over(self, attempt: int, total: int) -> None:
        if attempt in self._ready and attempt in self._granted:
            decode, prefill = self.cores["decode"], self.cores["prefill"]
            self._later("decode", lambda: decode.kv_landed(attempt, total))
            self._later("prefill", lambda: prefill.kv_sent(attempt))

    def _later(self, role: Role, action: Callable[[], None]) -> None:
        self._waiting[role].append(action)
        self._after(0.0, self._go_on)


@pytest.mark.parametrize("roles", [("colocated",), ("prefill", "decode")], ids=["colocated", "pair"])
@pytest.mark.parametrize("seed", range(2))
def test_the_engines_own_parameters_are_recovered_within_5_percent(
    roles: tuple[Role, ...], seed: int
) -> None:
    run = Run(roles, seed)
    for _ in range(STEPS):
        run.step()
    found = run.tracker.profile()
    assert found is not None
    assert run.tracker.refusal == ""
    platform = found.platform
    assert platform.decode_fixed_seconds == pytest.approx(A_S, rel=0.05)
    assert platform.decode_seconds_per_seq == pytest.approx(B_S, rel=0.05)
    assert platform.prefill_seconds_per_token == pytest.approx(PREFILL_S, rel=0.05)
    share = run.generating_s / run.live_s
    assert found.workload.bubble_ratio == pytest.approx((1.0 - share) / share, rel=0.05)
