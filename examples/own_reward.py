"""A reward of one's own: an answer that had to be mended is worth half.

cd examples && pearl run own_environment.toml environment.reward=own_reward:first_answers
"""

from pearl.envs.own_reward import Attempt


def first_answers(attempt: Attempt) -> float:
    return attempt.reward / len(attempt.actions)
