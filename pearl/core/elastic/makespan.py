"""How long a batch will take under an allocation: the bubble-aware makespan models (paper §4.3.1, Eqs. 1-3).

Each ``*_seconds`` function is one term of an equation, for the whole batch. Two more models of the same interface
are ``survival_fluid`` and ``closed_network``.
"""

from collections.abc import Callable

import msgspec

from pearl.types.plan import Allocation
from pearl.types.profile import Profile


class Terms(msgspec.Struct, frozen=True):
    """Parts of a makespan in seconds. Colocated they add up; disaggregated, the makespan is
    max(decode, prefill + transfer) + overhead + env."""

    prefill: float
    decode: float
    transfer: float
    overhead: float
    env: float


class Prediction(msgspec.Struct, frozen=True):
    seconds: float  # T_roll(pi)
    terms: Terms


Model = Callable[[Profile, Allocation], Prediction]
"""Predicts the makespan of an allocation with at least one worker in each of its mode's roles."""


def colocated_prefill_seconds(profile: Profile, num_workers: int) -> float:
    """S * B * Delta_L / N * t_prefill: the first term of Eq. 1."""
    load, platform = profile.workload, profile.platform
    tokens = load.batch_size * load.turn_input_tokens / num_workers
    return load.num_turns * tokens * platform.prefill_seconds_per_token


def colocated_decode_seconds(profile: Profile, num_workers: int) -> float:
    """S * r * (A + b * B / N): the second term of Eq. 1."""
    load, platform = profile.workload, profile.platform
    iteration = (
        platform.decode_fixed_seconds + platform.decode_seconds_per_seq * load.batch_size / num_workers
    )
    return load.num_turns * load.turn_output_tokens * iteration


def overhead_seconds(profile: Profile) -> float:
    """S * T_over: the third term of Eq. 1."""
    return profile.workload.num_turns * profile.platform.overhead_seconds


def pair_overhead_seconds(profile: Profile) -> float:
    """Return the overhead of a pair as measured, so that both modes are compared by what they really took; 0 in
    the paper's equations."""
    return profile.workload.num_turns * profile.platform.pair_overhead_seconds


def decode_seconds(profile: Profile, num_decode: int) -> float:
    """S * r * (A + b * B / (N_D * (1 + theta))) * (1 + theta): Eq. 2."""
    load, platform = profile.workload, profile.platform
    stretch = 1.0 + load.bubble_ratio
    concurrent = load.batch_size / (num_decode * stretch)
    iteration = platform.decode_fixed_seconds + platform.decode_seconds_per_seq * concurrent
    return load.num_turns * load.turn_output_tokens * iteration * stretch


def prefill_seconds(profile: Profile, num_prefill: int) -> float:
    """S * B * Delta_L / N_P * t_prefill: the first term of Eq. 3; that of Eq. 1 on a pool of its own."""
    return colocated_prefill_seconds(profile, num_prefill)


def transfer_seconds(profile: Profile) -> float:
    """S * B * Delta_L * K / BW: the second term of Eq. 3, the least that moving the KV cache can take."""
    load, platform = profile.workload, profile.platform
    kv_bytes = load.batch_size * load.turn_input_tokens * platform.kv_bytes_per_token
    return load.num_turns * kv_bytes / platform.kv_bandwidth_bytes_per_s


def closed_form(profile: Profile, allocation: Allocation) -> Prediction:
    """Predict the makespan: Eq. 1 when colocated; max(Eq. 2, Eq. 3) plus the measured pair overhead and T_env when
    disaggregated."""
    return _colocated(profile, allocation) if allocation.is_colocated else _disaggregated(profile, allocation)


def _colocated(profile: Profile, allocation: Allocation) -> Prediction:
    terms = Terms(
        prefill=colocated_prefill_seconds(profile, allocation.colocated),
        decode=colocated_decode_seconds(profile, allocation.colocated),
        transfer=0.0,
        overhead=overhead_seconds(profile),
        env=profile.workload.env_seconds,
    )
    return Prediction(terms.prefill + terms.decode + terms.overhead + terms.env, terms)


def _disaggregated(profile: Profile, allocation: Allocation) -> Prediction:
    terms = Terms(
        prefill=prefill_seconds(profile, allocation.prefill),
        decode=decode_seconds(profile, allocation.decode),
        transfer=transfer_seconds(profile),
        overhead=pair_overhead_seconds(profile),
        env=profile.workload.env_seconds,
    )
    work = max(terms.prefill + terms.transfer, terms.decode)
    return Prediction(work + terms.overhead + terms.env, terms)
