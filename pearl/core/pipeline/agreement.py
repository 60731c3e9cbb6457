"""Whether rollout and training still agree about the tokens of a step, and what to say when they do not.

Two statistics, since neither is enough. The mean gap is of tokens that were made wholly under the weights being
trained, so that age cannot be taken for a fault; few of them in a step wait for those of the next. The mean importance
weight is of all tokens, near 1 for any age, and so also holds where no token is that young.
"""

import math

import msgspec

from pearl.types.config import Config
from pearl.types.events import TrainFinished

MIN_TOKENS = 32
"""Fewer say too little of a mean."""
DEFAULT_MAX_GAPS = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats. Kernels of an engine and of a trainer round differently: by about 1e-6 and 1e-2."""


class GapSums(msgspec.Struct):
    """Over steps that had too few tokens by themselves."""

    total: float = 0.0  # nats
    tokens: int = 0


def max_logprob_gap(config: Config) -> float:
    """The bound on the mean gap, in nats."""
    limit = config.agreement.max_logprob_gap
    return DEFAULT_MAX_GAPS[config.model.dtype] if limit is None else limit


def disagreement(event: TrainFinished, sums: GapSums, config: Config) -> str:
    """Why the run must not go on after this step; "" = nothing is wrong. Takes the step into ``sums``."""
    what = _gap(event, sums, max_logprob_gap(config)) or _weight(event, config.agreement.min_tis_mean)
    if not what:
        return ""
    return (
        f"step {event.version.step - 1}: rollout and training do not compute the same model: {what}. The model is "
        f"{config.model.path!r} in {config.model.dtype}, the engine {config.rollout.engine!r}: what was trained is "
        "worth nothing. Try another rollout.engine or model; a gap that is sound for this pair is allowed by "
        "agreement.max_logprob_gap and agreement.min_tis_mean"
    )


def _gap(event: TrainFinished, sums: GapSums, limit: float) -> str:
    if not event.logprob_gap_tokens:
        return ""
    mean = event.metrics.get("logprob_gap_mean", math.nan)  # only finite numbers are reported
    if not math.isfinite(mean):
        return f"the log-prob gap of {event.logprob_gap_tokens} tokens is not finite"
    sums.total += mean * event.logprob_gap_tokens
    sums.tokens += event.logprob_gap_tokens
    if sums.tokens < MIN_TOKENS:
        return ""
    mean, tokens = sums.total / sums.tokens, sums.tokens
    sums.total, sums.tokens = 0.0, 0
    if mean <= limit:
        return ""
    return (
        f"their log-probs of {tokens} tokens made by the version being trained differ by {mean:.3g} nats on average, "
        f"agreement.max_logprob_gap is {limit:g}"
    )


def _weight(event: TrainFinished, least: float) -> str:
    mean = event.metrics.get("tis_mean")
    if mean is None or mean >= least or event.metrics.get("tokens_trained", 0.0) < MIN_TOKENS:
        return ""
    return (
        f"the mean importance weight of {event.metrics['tokens_trained']:.0f} tokens is {mean:.3g}, "
        f"agreement.min_tis_mean is {least:g}"
    )
