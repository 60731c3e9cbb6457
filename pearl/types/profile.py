"""What decisions are computed from: the workload of a batch and the speed of the platform (paper §4.2-§4.3).

Also the profile file of ``pearl decide`` and the simulator: ``{"workload": {...}, "platform": {...}}``.
"""

import msgspec


class TrajectoryClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Trajectories of a batch that live about equally long; their means."""

    share: float  # of the batch
    turns: float
    input_tokens: float  # prefilled a turn
    input_tokens2: float  # mean square of that over turns
    output_tokens: float  # generated a turn
    env_seconds: float  # a turn
    context_tokens: float  # of a trajectory at its end


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    batch_size: float  # B, trajectories a step
    num_turns: float  # S, of the slowest trajectory
    turn_input_tokens: float  # Delta L, actually prefilled a turn: cache misses included
    turn_output_tokens: float  # r, generated a turn
    bubble_ratio: float  # theta = (1 - f) / f, f the mean fraction of live trajectories that decode
    env_seconds: float  # T_env of the batch: of the slowest trajectory, all its turns
    mean_turns: float = 0.0  # of all trajectories; 0 = not known
    classes: tuple[TrajectoryClass, ...] = ()  # the quickest first; () = not known
    in_flight: float = (
        0.0  # trajectories at all times, where a batch begins before the last one ends; 0 = it does not
    )


class Platform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Per worker (not per GPU)."""

    prefill_seconds_per_token: float  # t_prefill
    decode_fixed_seconds: float  # A, an iteration
    decode_seconds_per_seq: float  # b, each sequence adds an iteration
    overhead_seconds: float  # T_over, a turn, colocated only
    kv_bytes_per_token: float  # K
    kv_bytes_per_trajectory: float  # K_seq
    kv_capacity_bytes: float  # H_max
    kv_bandwidth_bytes_per_s: float  # BW, between the pools
    pair_overhead_seconds: float = 0.0  # what disaggregated steps took beyond the model, a turn
    decode_seconds_per_context_token: float = (
        0.0  # b grows by so much with a sequence's context; 0 = not known
    )
    decode_context_tokens: float = 0.0  # the context at which it is b


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workload: Workload
    platform: Platform


class IterationSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums over engine iterations for the regression seconds = A + b * decoding + t_prefill * prefill_tokens, where b
    may grow with the context."""

    count: float  # whole on the wire; a fraction where older sums fade
    seconds: float
    decoding: float  # sequences decoded
    prefill: float  # tokens prefilled
    decoding2: float  # sums of products: decoding * decoding, and so on
    prefill2: float
    decoding_prefill: float
    seconds_decoding: float
    seconds_prefill: float
    seconds2: float
    context: float  # context tokens of the decoding sequences
    context2: float = 0.0
    decoding_context: float = 0.0
    prefill_context: float = 0.0
    seconds_context: float = 0.0
