"""Telemetry of a job whose true profile is known: what a tracker would be fed, with noise."""

from random import Random

from pearl.core.elastic.iteration_fit import NOTHING, add
from pearl.core.elastic.makespan import closed_form
from pearl.core.elastic.runtime_tracker import (
    PlatformPriors,
    RuntimeTracker,
    TrackerState,
    TrajectorySample,
)
from pearl.types.plan import Allocation, Role
from pearl.types.profile import IterationSums, Platform, Profile
from pearl.types.trajectory import Turn

ITERATIONS = 150
"""Of a role in a step; a real one has thousands."""


def iteration_sums(seconds: float, decoding: float, prefill: float) -> IterationSums:
    return IterationSums(
        count=1,
        seconds=seconds,
        decoding=decoding,
        prefill=prefill,
        decoding2=decoding * decoding,
        prefill2=prefill * prefill,
        decoding_prefill=decoding * prefill,
        seconds_decoding=seconds * decoding,
        seconds_prefill=seconds * prefill,
        seconds2=seconds * seconds,
        context=1000.0 * decoding,
    )


def iterate(
    platform: Platform, role: Role, rng: Random, noise: float, count: int = ITERATIONS
) -> IterationSums:
    """Iterations of one role over its operating range: some prefill, most do not."""
    sums = NOTHING
    for _ in range(count):
        decoding = 0 if role == "prefill" else rng.randint(1, 16)
        prefills = role == "prefill" or (role == "colocated" and rng.random() < 0.3)
        prefill = rng.choice((64, 128, 256, 512)) if prefills else 0
        exact = (
            platform.decode_fixed_seconds
            + platform.decode_seconds_per_seq * decoding
            + platform.prefill_seconds_per_token * prefill
        )
        sums = add(sums, iteration_sums(exact * rng.lognormvariate(0.0, noise), decoding, prefill))
    return sums


class SyntheticJob:
    """Steps of a job with a true ``profile``, told to ``tracker`` with relative noise on everything that varies."""

    def __init__(self, profile: Profile, seed: int, noise: float, smoothing: float = 0.3) -> None:
        self.profile = profile
        self.noise = noise
        self._rng = Random(seed)
        platform = profile.platform
        priors = PlatformPriors(
            platform.kv_bytes_per_token, platform.kv_capacity_bytes, platform.kv_bandwidth_bytes_per_s
        )
        self.tracker = RuntimeTracker(TrackerState(), int(profile.workload.batch_size), smoothing, priors)

    def step(self, allocation: Allocation) -> None:
        roles: tuple[Role, ...] = ("prefill", "decode", "colocated")
        for role in roles:
            if allocation.count(role):
                sums = iterate(self.profile.platform, role, self._rng, self.noise)
                self.tracker.on_iterations(role, sums)
        makespan_s = self._noisy(closed_form(self.profile, allocation).seconds)
        batch = self._batch_factors()
        samples = [self._trajectory(*batch) for _ in range(int(self.profile.workload.batch_size))]
        self.tracker.on_step(samples, makespan_s, [(allocation, makespan_s)])

    def _noisy(self, value: float) -> float:
        return value * self._rng.lognormvariate(0.0, self.noise)

    def _batch_factors(self) -> tuple[float, float, float, float]:
        return self._noisy(1.0), self._noisy(1.0), self._noisy(1.0), self._noisy(1.0)

    def _trajectory(
        self, more_in: float, more_out: float, more_env: float, longer: float
    ) -> TrajectorySample:
        """All are as long as the slowest; what they carry varies with the batch and with the trajectory."""
        load, platform = self.profile.workload, self.profile.platform
        turns = round(load.num_turns)
        context = platform.kv_bytes_per_trajectory / platform.kv_bytes_per_token / turns
        retained = min(load.turn_output_tokens, context)
        turn = Turn(
            new_prompt_tokens=round(context - retained),
            prefilled_tokens=round(self._noisy(load.turn_input_tokens * more_in)),
            generated_tokens=round(self._noisy(load.turn_output_tokens * more_out)),
            retained_tokens=round(retained),
            env_seconds=self._noisy(load.env_seconds * more_env / turns),
        )
        generating = load.env_seconds / load.bubble_ratio if load.bubble_ratio else 1.0
        return TrajectorySample((turn,) * turns, self._noisy(generating * longer))
