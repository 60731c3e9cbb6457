"""What the run has counted so far; the source of summary.json."""

import msgspec


class Counters(msgspec.Struct):
    tokens_generated: int = 0  # accepted from workers for training trajectories, discarded ones included
    tokens_trained: int = 0  # generated tokens in unmasked samples of the surviving lineage
    tokens_lost: int = 0  # sampled by workers that died before they were streamed
    tokens_lost_unknown: int = 0  # deaths whose counter could not be read
    tokens_discarded: int = 0  # accepted, then thrown away: restarts and dead lineages
    evaluation_tokens: int = 0
    prefilled_tokens: int = 0
    reprefilled_tokens: int = 0  # of these, beyond the first time: caches lost, what a decode worker made
    trajectories_trained: int = 0
    trajectories_masked: int = 0
    trajectories_restarted: int = 0
    interrupted_trajectories: int = 0  # attempts that an update, an abort or a death cut short
    environment_failures: int = 0
    failed_attempts: int = 0
    expired_trajectories: int = 0
    updates_discarded: int = 0
    max_staleness: int = 0
    max_logprob_gap: float = 0.0
    logprob_gap_tokens: int = 0
    compared_tokens: int = 0  # with plain transformers, before the first step
    comparison_max_gap: float = 0.0  # nats, over those
    comparisons_skipped: int = 0
    workers_lost: int = 0  # unplanned
    arrivals: int = 0  # preemptible GPUs that came
    reclaims: int = 0  # and that were taken away, with notice or without
    borrows: int = 0  # times the training GPUs were lent
    returns: int = 0  # and came back
    expansions: int = 0  # admitted groups of joiners
    expansions_cancelled: int = 0
    activation_seconds_mean: float = 0.0  # from the decision to lend until the workers serve
    deactivation_seconds_mean: float = 0.0  # from the decision to return until training can go on
    mode_switches: int = 0  # between colocated and disaggregated
    ratio_switches: int = 0  # of workers between prefill and decode
    role_changes: int = 0  # workers that a plan had change their role
    tokens_lost_planned: int = 0  # of workers that left within their grace
    trainers_lost: int = 0
    stale_events: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    eval_reward_start: float | None = None
    eval_reward: float | None = None
