"""Sampling seeds: a pure function of the run's seed and the trajectory, the same wherever and however often."""

from pearl.state.ids import TrajectoryId

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """One output of SplitMix64 for the state ``value``: a bijection of 64 bits whose bits all depend on all."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def trajectory_seed(run_seed: int, trajectory: TrajectoryId) -> int:
    """64 bits that name the trajectory's random stream."""
    return splitmix64(splitmix64(run_seed & _MASK) ^ trajectory)
