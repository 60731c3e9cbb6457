import pytest

from pearl.types.config import TrainingConfig
from pearl.workers.training.learning_rate import learning_rate


def test_constant_with_warm_up() -> None:
    config = TrainingConfig(learning_rate=1.0, warmup_steps=3)
    assert [learning_rate(step, config, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_ends_at_zero() -> None:
    config = TrainingConfig(learning_rate=1.0, schedule="linear")
    assert [learning_rate(step, config, 4) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_is_half_way_in_the_middle() -> None:
    config = TrainingConfig(learning_rate=2.0, schedule="cosine", warmup_steps=2)
    assert learning_rate(2, config, 12) == 2.0
    assert learning_rate(7, config, 12) == pytest.approx(1.0)
    assert learning_rate(12, config, 12) == pytest.approx(0.0)
