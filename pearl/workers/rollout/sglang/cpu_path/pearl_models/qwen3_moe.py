"""Mixture of experts of the same family."""

from sglang.srt.models.qwen3_moe import EntryClass

__all__ = ["EntryClass"]
