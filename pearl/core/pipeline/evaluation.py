"""Greedy evaluation on unseen tasks, before the first step and after the last: a round is bound to one step's
weights, and all its trajectories are made with exactly those."""

import msgspec

from pearl.types.ids import EVALUATION_BASE, EVALUATION_STRIDE, TrajectoryId


class EvaluationRound(msgspec.Struct):
    round: int
    step: int  # the version that is evaluated
    num_tasks: int
    opened: int = 0
    finished: int = 0
    masked: int = 0
    reward_sum: float = 0.0
    tokens: int = 0

    def open_next(self) -> TrajectoryId:
        index = self.opened
        self.opened += 1
        return TrajectoryId(EVALUATION_BASE + self.round * EVALUATION_STRIDE + index)

    @property
    def is_complete(self) -> bool:
        return self.finished == self.num_tasks

    @property
    def reward_mean(self) -> float:
        """Return the mean reward over tasks whose environment worked; 0.0 when none did."""
        counted = self.finished - self.masked
        return self.reward_sum / counted if counted else 0.0


def task_of(trajectory: TrajectoryId) -> int:
    return (trajectory - EVALUATION_BASE) % EVALUATION_STRIDE
