"""A third makespan model: a closed queueing network whose trajectories differ. Same interface as the closed form.

A batch is a few classes of trajectories that live about equally long, as measured. All that live share the prefill
queue, the decode iterations and, between the pools, the link; a turn's time in each class follows from what all the
others keep there (mean-value analysis, first come first served for prefill, shared iterations for decode). Classes
finish one after the other, so that load falls; contexts grow, so that what a turn prefills and how long an iteration
takes grow too; prefixes that memory cannot keep are prefilled again. Where the profile has no classes, it is the
survival fluid.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pearl.core.elastic.makespan import Prediction, Terms
from pearl.core.elastic.survival_fluid import survival_fluid
from pearl.types.plan import Allocation
from pearl.types.profile import Platform, Profile, TrajectoryClass

FIRST_SHARE = 0.1
"""Of its final context, what a trajectory begins with: its prompt."""
MEAN_SHARE = (1.0 + FIRST_SHARE) / 2
STAGES = 6
"""At least so many stretches of the slowest class's life in which contexts and load are taken as constant."""
FLOW_ROUNDS = 4
"""Of lifetimes, and of how many of each class there are at a time for them."""
MAX_ITERATIONS = 40
PRECISION = 1e-3
MAX_UTILIZATION = 0.97
"""Prefill is never taken for a larger part of a worker's time: turns become longer until it is less."""


class Pools(NamedTuple):
    """What the allocation makes of the platform."""

    prefill: int  # workers
    decode: int
    shares_iterations: bool  # colocated: prefill stops decoding on its worker
    transfer_seconds: float  # a prefilled token
    fixed_seconds: float  # a turn, besides stations and environment
    kept_tokens: float  # that all prefill workers together have room for


class ClassState:
    """A class while it lives: ``done`` is the part of its turns behind it."""

    __slots__ = (
        "context",
        "count",
        "decode",
        "done",
        "of",
        "per_iteration",
        "prefill",
        "seconds",
        "tokens",
        "tokens2",
        "wait",
    )

    def __init__(self, of: TrajectoryClass, count: float, seconds: float) -> None:
        self.of = of
        self.count = count
        self.done = 0.0
        self.seconds = seconds  # of a turn
        self.prefill = self.decode = 0.0  # of those
        self.wait = 0.0  # of prefill, for those that came before
        self.context = 0.0
        self.per_iteration = 0.0  # seconds that one of it adds to an iteration
        self.tokens = self.tokens2 = 0.0  # to prefill a turn, and their mean square

    @property
    def left_seconds(self) -> float:
        return (1.0 - self.done) * self.of.turns * self.seconds


@lru_cache(maxsize=2048)  # within a step the same allocations are asked about for gates, roles and reports
def closed_network(profile: Profile, allocation: Allocation) -> Prediction:
    """The makespan of an allocation; its terms are those of the slowest class and add up in both modes."""
    if not profile.workload.classes:
        return survival_fluid(profile, allocation)
    platform, pools = profile.platform, _pools(profile.platform, allocation)
    live = [_member(of, profile, pools) for of in profile.workload.classes]
    if profile.workload.in_flight:
        return _flowing(profile, live, pools)
    prefill = decode = transfer = overhead = env = 0.0
    while live:
        slowest = live[-1]
        _set_contexts(live, platform, pools, slowest.of.turns * slowest.seconds / STAGES / 2)
        _solve(live, platform, pools)
        passed_s = min(min(m.left_seconds for m in live), slowest.of.turns * slowest.seconds / STAGES)
        made = passed_s / slowest.seconds
        prefill += made * slowest.prefill
        decode += made * slowest.decode
        transfer += made * slowest.tokens * pools.transfer_seconds
        overhead += made * pools.fixed_seconds
        env += made * slowest.of.env_seconds
        for member in live:
            member.done += passed_s / (member.of.turns * member.seconds)
        live = [member for member in live if member.done < 1.0 - 1e-9]
    terms = Terms(prefill, decode, transfer, overhead, env)
    return Prediction(prefill + decode + transfer + overhead + env, terms)


def _flowing(profile: Profile, live: Sequence[ClassState], pools: Pools) -> Prediction:
    """Seconds of a step where trajectories of the next batch begin as slots become free: by Little's law what a
    trajectory lives on average, while the load stays what it is; but a batch is over only with its slowest, and no more
    than two of them are in flight."""
    load = profile.workload
    for member in live:
        member.done = 0.5
    for _ in range(FLOW_ROUNDS):
        lives = [member.of.share * member.of.turns * member.seconds for member in live]
        for member, seconds in zip(live, lives, strict=True):
            member.count = load.in_flight * seconds / sum(lives)
        _set_contexts(live, profile.platform, pools, 0.0)
        _solve(live, profile.platform, pools)
    shares = sum(member.of.share for member in live)
    mean_s = sum(member.of.share * member.of.turns * member.seconds for member in live) / shares
    step_s = max(mean_s * load.batch_size / load.in_flight, live[-1].of.turns * live[-1].seconds / 2)
    part = step_s / live[-1].seconds
    terms = Terms(
        part * live[-1].prefill,
        part * live[-1].decode,
        part * live[-1].tokens * pools.transfer_seconds,
        overhead=part * pools.fixed_seconds,
        env=part * live[-1].of.env_seconds,
    )
    return Prediction(step_s, terms)


def _pools(platform: Platform, allocation: Allocation) -> Pools:
    per_worker = platform.kv_capacity_bytes / max(platform.kv_bytes_per_token, 1e-9)
    if allocation.is_colocated:
        workers = allocation.colocated
        return Pools(workers, workers, True, 0.0, platform.overhead_seconds, workers * per_worker)
    return Pools(
        allocation.prefill,
        allocation.decode,
        False,
        platform.kv_bytes_per_token / platform.kv_bandwidth_bytes_per_s,
        platform.pair_overhead_seconds,
        allocation.prefill * per_worker,
    )


def _member(of: TrajectoryClass, profile: Profile, pools: Pools) -> ClassState:
    """A turn begins as if it were alone."""
    platform = profile.platform
    alone = of.input_tokens * platform.prefill_seconds_per_token
    alone += of.output_tokens * (platform.decode_fixed_seconds + platform.decode_seconds_per_seq)
    return ClassState(
        of, of.share * profile.workload.batch_size, alone + of.env_seconds + pools.fixed_seconds + 1e-9
    )


def _set_contexts(live: Sequence[ClassState], platform: Platform, pools: Pools, ahead_s: float) -> None:
    """Contexts a little ahead, in the middle of the stretch that begins, and what follows from them."""
    held = 0.0
    for member in live:
        of = member.of
        part = FIRST_SHARE + (1.0 - FIRST_SHARE) * min(
            1.0, member.done + ahead_s / (of.turns * member.seconds)
        )
        member.context = of.context_tokens * part
        held += member.count * member.context
        beyond = member.context - platform.decode_context_tokens
        grown = platform.decode_seconds_per_seq + platform.decode_seconds_per_context_token * beyond
        member.per_iteration = max(0.0, grown)
        factor = part / MEAN_SHARE
        member.tokens = of.input_tokens * factor
        member.tokens2 = of.input_tokens2 * factor * factor
    lost = 1.0 - min(1.0, pools.kept_tokens / held) if held else 0.0
    if lost > 0.0:
        for member in live:
            member.tokens += lost * max(0.0, member.context - member.tokens)
            member.tokens2 += lost * max(0.0, member.context * member.context - member.tokens2)


def _solve(live: Sequence[ClassState], platform: Platform, pools: Pools) -> None:
    """Turn times that fit together, by going round until they change no more."""
    per_token, fixed = platform.prefill_seconds_per_token, platform.decode_fixed_seconds
    outside = pools.fixed_seconds
    for _ in range(MAX_ITERATIONS):
        # Seconds of prefill a second, their squares, those that wait, and seconds of decoding an iteration.
        work = work2 = waiting = iterations = 0.0
        for member in live:
            rate = member.count / member.seconds
            work += rate * member.tokens
            work2 += rate * member.tokens2
            waiting += rate * member.tokens * member.wait
            iterations += rate * member.decode * member.per_iteration
        work *= per_token
        work2 *= per_token * per_token
        waiting *= per_token
        change = 0.0
        for member in live:
            of, seconds = member.of, member.seconds
            own = member.tokens * per_token
            squares = work2 - member.tokens2 * per_token * per_token / seconds
            before = squares / 2 + waiting - own * member.wait / seconds
            member.wait += 0.5 * (max(0.0, before) / pools.prefill - member.wait)
            member.prefill = own + member.wait
            beside = max(0.0, iterations - member.per_iteration * member.decode / seconds) / pools.decode
            decode = of.output_tokens * (fixed + member.per_iteration + beside)
            if pools.shares_iterations:
                decode /= 1.0 - min(max(0.0, work - own / seconds) / pools.prefill, MAX_UTILIZATION)
            member.decode += 0.5 * (decode - member.decode) if member.decode else decode
            transfer = member.tokens * pools.transfer_seconds
            found = member.prefill + member.decode + transfer + of.env_seconds + outside
            step = 0.5 * (found - seconds)
            change = max(change, abs(step) / seconds)
            member.seconds = seconds + step
        if change < PRECISION:
            break
    for member in live:
        transfer = member.tokens * pools.transfer_seconds
        member.seconds = member.prefill + member.decode + transfer + member.of.env_seconds + outside + 1e-12
