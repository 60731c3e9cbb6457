"""Runs commands that a model wrote: one contract, with isolation and without; ``docs/agents.md`` compares them."""

from pearl.envs.sandbox.limits import ExecResult, Kind, SandboxError, SandboxLimits
from pearl.envs.sandbox.preflight import preflight
from pearl.envs.sandbox.sandbox import Sandbox

__all__ = ["ExecResult", "Kind", "Sandbox", "SandboxError", "SandboxLimits", "preflight"]
