"""What an emulated engine is built with."""

from dataclasses import dataclass, field

from pearl.types.config import Config, EmulatedConfig


@dataclass(frozen=True, slots=True)
class EmulatedSettings:
    vocabulary_size: int
    timing: EmulatedConfig = field(default_factory=EmulatedConfig)
    seed: int = 0
    slot: int = 0
    kv_capacity_tokens: int = 65536
    prefill_chunk_tokens: int = 512
    max_running: int = 128
    flush_period_s: float = 0.01
    """Tokens are told at most so much later than they were made: less often than every iteration, which costs time."""


def settings_of(config: Config, slot: int, vocabulary_size: int) -> EmulatedSettings:
    rollout = config.rollout
    return EmulatedSettings(
        vocabulary_size=vocabulary_size,
        timing=config.emulated,
        seed=config.run.seed,
        slot=slot,
        kv_capacity_tokens=rollout.kv_capacity_tokens,
        prefill_chunk_tokens=rollout.prefill_chunk_tokens,
        max_running=rollout.max_requests_per_worker,
        flush_period_s=rollout.frame_period_s / 2,
    )
