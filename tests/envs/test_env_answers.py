"""What environment code may return as a reward, and how anything else is refused without running into it."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from pearl.envs.protocol import EnvironmentSpec, Observation
from pearl.envs.response_validator import BadAnswerError, ResponseValidator

CHECK = ResponseValidator(EnvironmentSpec(257, (256,), 0, 0, 10, True), 64, 64)


class Raising:
    def __float__(self) -> float:
        raise OSError("a\ud800b")

    def __repr__(self) -> str:
        raise ValueError


def observed(reward: Any, done: Any = False) -> Any:
    return CHECK.observation(Observation([1], reward, done))


@pytest.mark.parametrize(
    ("reward", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (1e9, 1e9),
        (np.float32(0.25), 0.25),
        (np.float64(0.25), 0.25),
        (np.float16(0.5), 0.5),
        (np.int64(-3), -3.0),
        (np.bool_(True), 1.0),
        (np.array(0.75), 0.75),
        (Decimal("0.125"), 0.125),
        (Fraction(1, 4), 0.25),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
    ids=repr,
)
def test_every_finite_real_number_is_a_reward(reward: Any, number: float) -> None:
    found = observed(reward).reward
    assert type(found) is float
    assert found == number


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (float("nan"), "the reward nan: a finite real number"),
        (float("-inf"), "the reward -inf: a finite real number"),
        (np.float32("inf"), "the reward inf: a finite real number"),
        (Decimal("NaN"), "the reward nan: a finite real number"),
        (1e300, r"the reward 1e\+300: its magnitude may be at most 1e\+09; scale rewards down"),
        (-1e10, r"the reward -1e\+10: its magnitude"),
        (10**400, "the reward inf: a finite real number"),
        (Decimal("1e400"), "the reward inf: a finite real number"),
        ("0.5", "the reward str: a finite real number"),
        (b"1", "the reward bytes: a finite real number"),
        (None, "the reward NoneType: a finite real number"),
        (1j, "the reward complex: a finite real number"),
        (np.complex64(1), "the reward complex64: a finite real number"),
        (np.array([0.5]), "the reward ndarray: a finite real number"),
        (torch.tensor([0.5]), "the reward Tensor: a finite real number"),
        (Raising(), r"the reward Raising, which gives no number: a\\ud800b"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_real_number_is_refused(reward: Any, said: str) -> None:
    with pytest.raises(BadAnswerError, match=said):
        observed(reward)


def test_done_is_a_truth_value_and_what_is_none_is_not_asked_for_its_repr() -> None:
    assert observed(0.0, np.bool_(True)).done is True
    with pytest.raises(BadAnswerError, match="done = Raising: True or False"):
        observed(0.0, Raising())
    with pytest.raises(BadAnswerError, match="done = 1: True or False"):
        observed(0.0, 1)


def test_loss_weights_that_are_no_numbers_are_refused() -> None:
    for weights in ([0.5, "x"], [Raising(), 1.0], [[1.0], [1.0, 2.0]]):
        with pytest.raises(BadAnswerError, match="loss weights"):
            CHECK.demonstration([1, 2], weights)
