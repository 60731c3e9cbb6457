"""``environment.name = "jsonl"``: a file of prompts and a function that says how good an answer is."""

from pearl.envs.jsonl.environment import JsonlEnvironment

__all__ = ["JsonlEnvironment"]
