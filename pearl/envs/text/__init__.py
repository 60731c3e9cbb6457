"""Environments that speak in messages and tools instead of token ids; ``docs/agents.md`` says how to write one."""

from pearl.envs.text.base import TextEnvironment, TextEpisode
from pearl.envs.text.messages import Message, Tool

__all__ = ["Message", "TextEnvironment", "TextEpisode", "Tool"]
