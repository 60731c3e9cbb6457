"""A second makespan model: survival fluid. Same interface as the closed form, fewer of its simplifications.

A turn visits stations (prefill, transfer, decode) and the environment. For n live trajectories, mean-value analysis
gives the turn's time at each station: its own demand, stretched by what the others keep there. Trajectories finish at
different turns, so that n falls as the batch goes on; the makespan is the sum of the turn times that the slowest
trajectory meets. The bubble ratio is not an input: it comes out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pearl.core.elastic.makespan import Prediction, Terms
from pearl.types.plan import Allocation
from pearl.types.profile import Profile

USUAL_TURNS_RATIO = 0.45
"""Mean turns over those of the slowest, where the profile does not say: recorded SWE-bench trajectories have 36.6
turns and 81 for the longest of 64."""
POINTS = 16
"""Stretches of the slowest trajectory's life with n taken as constant; twice as many change it by under 1 %."""
NEWTON_STEPS = 30
"""A bound only: from below, Newton's method on a convex function takes about five."""
PRECISION = 1e-9


class Station(NamedTuple):
    """Where a turn takes ``own_seconds`` alone, and is stretched by others: R = own / (1 - X * stretch).

    X is the turns a second that all other live trajectories make.
    """

    own_seconds: float
    stretch: float


def survival_fluid(profile: Profile, allocation: Allocation) -> Prediction:
    """The makespan of an allocation; its terms add up in both modes."""
    load = profile.workload
    stations = (
        _colocated(profile, allocation) if allocation.is_colocated else _disaggregated(profile, allocation)
    )
    platform = profile.platform
    fixed = platform.overhead_seconds if allocation.is_colocated else platform.pair_overhead_seconds
    env = load.env_seconds / load.num_turns
    sums = [0.0] * len(stations)
    for live in _live(profile):
        for index, seconds in enumerate(turn_seconds(stations, fixed + env, live)):
            sums[index] += seconds
    prefill, transfer, decode = (total / POINTS * load.num_turns for total in sums)
    terms = Terms(prefill, decode, transfer, overhead=fixed * load.num_turns, env=load.env_seconds)
    return Prediction(prefill + transfer + decode + terms.overhead + terms.env, terms)


def _colocated(profile: Profile, allocation: Allocation) -> list[Station]:
    """The others' prefill on the same worker stretches decode too."""
    prefill, _, decode = _disaggregated(profile, Allocation(prefill=1, decode=1))
    share = 1.0 / allocation.colocated
    return [
        Station(prefill.own_seconds, prefill.stretch * share),
        Station(0.0, 0.0),
        Station(decode.own_seconds, (decode.stretch + prefill.stretch) * share),
    ]


def _disaggregated(profile: Profile, allocation: Allocation) -> list[Station]:
    """Prefill and transfer queue one behind the other; a decode iteration takes b longer for every other sequence."""
    load, platform = profile.workload, profile.platform
    prefill = load.turn_input_tokens * platform.prefill_seconds_per_token
    transfer = load.turn_input_tokens * platform.kv_bytes_per_token / platform.kv_bandwidth_bytes_per_s
    fixed, per_seq = platform.decode_fixed_seconds, platform.decode_seconds_per_seq
    return [
        Station(prefill, prefill / allocation.prefill),
        Station(transfer, transfer),
        Station(
            load.turn_output_tokens * (fixed + per_seq), load.turn_output_tokens * per_seq / allocation.decode
        ),
    ]


def _live(profile: Profile) -> list[float]:
    """Live trajectories at the middle of each stretch: B * (1 - u) ** k, whose mean is the profile's mean of turns."""
    load = profile.workload
    ratio = load.mean_turns / load.num_turns if load.mean_turns else USUAL_TURNS_RATIO
    exponent = 1.0 / min(max(ratio, 1e-3), 1.0) - 1.0
    return [max(1.0, load.batch_size * (1.0 - (i + 0.5) / POINTS) ** exponent) for i in range(POINTS)]


def turn_seconds(stations: Sequence[Station], delay_s: float, live: float) -> list[float]:
    """Seconds of a turn at each station, with ``live`` trajectories that also spend ``delay_s`` elsewhere."""
    others = live - 1.0
    pulls = [others * station.stretch for station in stations]
    cycle = _cycle_seconds(stations, pulls, delay_s)
    return [
        station.own_seconds * cycle / (cycle - pull) if station.own_seconds else 0.0
        for station, pull in zip(stations, pulls, strict=True)
    ]


def _cycle_seconds(stations: Sequence[Station], pulls: Sequence[float], delay_s: float) -> float:
    """C = delay + sum of own * C / (C - pull), where X = others / C: the one root above every pull.

    The right side less C is convex and falls, and the start is below the root, so that Newton's method climbs to it.
    """
    used = [(s.own_seconds, pull) for s, pull in zip(stations, pulls, strict=True) if s.own_seconds]
    cycle = max([delay_s + sum(own for own, _ in used), *(own + pull for own, pull in used)])
    for _ in range(NEWTON_STEPS):
        excess, slope = delay_s - cycle, -1.0
        for own, pull in used:
            room = cycle - pull
            excess += own * cycle / room
            slope -= own * pull / (room * room)
        step = excess / slope
        cycle -= step
        if abs(step) <= PRECISION * cycle:
            break
    return cycle
