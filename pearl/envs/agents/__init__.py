"""Agents that own their loop: a function with a client, or a program that speaks to an endpoint. ``docs/agents.md``."""

from pearl.envs.agents.client import Client
from pearl.envs.agents.errors import OutOfContextError, OutOfTurnsError, TruncatedError

__all__ = ["Client", "OutOfContextError", "OutOfTurnsError", "TruncatedError"]
