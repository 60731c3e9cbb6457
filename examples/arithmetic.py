"""A reward function for prompts from a file: is the last number of the answer the right one?

pearl check-env examples/arithmetic.toml model.path=MODEL_DIRECTORY
pearl run examples/arithmetic.toml model.path=MODEL_DIRECTORY
"""

import re
from typing import Any


def reward(task: dict[str, Any], answer: str) -> dict[str, float]:
    """1 for the right number, and a little for an answer that has one at all."""
    numbers = re.findall(r"-?\d+", answer)
    return {"right": 0.9 * (numbers[-1:] == [task["solution"]]), "number": 0.1 * bool(numbers)}
