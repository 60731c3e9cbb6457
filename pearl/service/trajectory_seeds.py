"""Sampling seeds: a pure function of the run's seed and the trajectory, the same wherever and however often."""

from pearl.types.ids import TrajectoryId
from pearl.types.splitmix import MASK64, splitmix64


def trajectory_seed(run_seed: int, trajectory: TrajectoryId) -> int:
    """64 bits that name the trajectory's random stream."""
    return splitmix64(splitmix64(run_seed & MASK64) ^ trajectory)
