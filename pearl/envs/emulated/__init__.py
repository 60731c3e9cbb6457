"""An environment without text: prompts and observations of meaningless ids, with lengths, turns and latencies."""

from pearl.envs.emulated.environment import EmulatedEnvironment

__all__ = ["EmulatedEnvironment"]
