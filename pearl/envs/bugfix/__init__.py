"""A symbolic bug-fix environment: repair a program of a few symbols with the tools TEST, VIEW, EDIT and SUBMIT."""

from pearl.envs.bugfix.environment import BugfixEnvironment

__all__ = ["BugfixEnvironment"]
