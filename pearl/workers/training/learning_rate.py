"""The learning rate as a function of the training step alone, so that a resumed run needs no scheduler state."""

import math

from pearl.types.config import TrainingConfig


def learning_rate(step: int, config: TrainingConfig, num_steps: int) -> float:
    """Return the rate of training step ``step`` (from 0): linear warm-up, then constant, or down to 0 at
    ``num_steps``."""
    warm = warmup(step, config.warmup_steps)
    if warm < 1.0 or config.schedule == "constant":
        return config.learning_rate * warm
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)  # ratio of the decay
    done = min(1.0, done)
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.learning_rate * left


def warmup(step: int, num_steps: int) -> float:
    """Factor of a linear warm-up over ``num_steps`` steps: the first step already learns."""
    return 1.0 if step >= num_steps else (step + 1) / (num_steps + 1)
