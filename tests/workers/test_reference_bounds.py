"""Which gaps to plain transformers are rounding, and which are not."""

from typing import Literal

import pytest

from pearl.types.config import ModelConfig
from pearl.workers.reference import Gaps, complaint


def told(dtype: Literal["float32", "bfloat16"], gaps: list[float]) -> str:
    found = Gaps("a sequence", list(range(len(gaps))), gaps, [0.0] * len(gaps))
    return complaint("training", ModelConfig(dtype=dtype), [found])


def test_one_token_of_another_expert_is_rounding_in_bfloat16_only() -> None:
    one_of_many = [0.01] * 99 + [5.0]
    assert told("bfloat16", one_of_many) == ""
    assert "at position 99" in told("float32", [gap / 1e4 for gap in one_of_many[:-1]] + [0.001])


@pytest.mark.parametrize("gaps", [[0.2] * 10, [0.0] * 9 + [float("nan")], [0.0] * 9 + [float("inf")]])
def test_many_or_boundless_gaps_are_never_rounding(gaps: list[float]) -> None:
    assert "does not compute the model" in told("bfloat16", gaps)
