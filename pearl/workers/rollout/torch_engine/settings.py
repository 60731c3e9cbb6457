"""What a torch engine is built with, checked."""

from dataclasses import dataclass

import torch

from pearl.types.config import Config

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    kv_capacity_tokens: int = 65536
    page_tokens: int = 16
    prefill_chunk_tokens: int = 512
    max_running: int = 128
    device: torch.device = CPU
    max_context_tokens: int = 32768
    vocabulary_size: int | None = None
    """Ids that may be generated; further rows of a model are padding. None = all of its rows."""

    def __post_init__(self) -> None:
        for key, value in (
            ("rollout.page_tokens", self.page_tokens),
            ("rollout.prefill_chunk_tokens", self.prefill_chunk_tokens),
            ("rollout.max_requests_per_worker", self.max_running),
        ):
            if value < 1:
                raise ValueError(f"{key} = {value}; it must be at least 1")
        if self.kv_capacity_tokens < self.page_tokens:
            raise ValueError(
                f"rollout.kv_capacity_tokens = {self.kv_capacity_tokens} is less than one page of "
                f"{self.page_tokens} tokens; raise it"
            )


def settings_of(config: Config, device: torch.device, vocabulary_size: int | None = None) -> EngineSettings:
    rollout = config.rollout
    return EngineSettings(
        kv_capacity_tokens=rollout.kv_capacity_tokens,
        page_tokens=rollout.page_tokens,
        prefill_chunk_tokens=rollout.prefill_chunk_tokens,
        max_running=rollout.max_requests_per_worker,
        device=device,
        max_context_tokens=rollout.max_context_tokens,
        vocabulary_size=vocabulary_size,
    )
