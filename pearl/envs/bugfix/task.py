"""Tasks: a program that differs in one line from the one that is needed. (split, index) always gives the same task.

Train and evaluation are disjoint by construction: an instance's own hash says which split it belongs to, and a
task's draw is repeated until it falls into the wanted one.
"""

import hashlib
import random
from typing import NamedTuple

import msgspec

from pearl.envs.bugfix.tokenizer import MAX_LINES, MAX_SYMBOLS
from pearl.envs.protocol import Split

EVALUATION_SHARE = 1 / 8
"""Of all instances. A draw for the evaluation split then takes eight tries in the mean."""
NUM_EVALUATION_TASKS = 4096


class Shape(NamedTuple):
    """How large programs are. More symbols make a guess worse; more lines make the failing one harder to guess."""

    num_lines: int
    num_symbols: int


class Task(msgspec.Struct, frozen=True):
    broken: tuple[int, ...]  # a symbol a line
    line: int  # where the bug is
    needed: int  # the symbol that belongs there

    @property
    def fixed(self) -> tuple[int, ...]:
        return (*self.broken[: self.line], self.needed, *self.broken[self.line + 1 :])


def check_shape(shape: Shape) -> None:
    """ValueError when the vocabulary or the idea of a bug does not allow it."""
    if not 1 <= shape.num_lines <= MAX_LINES:
        raise ValueError(f"environment.options.num_lines = {shape.num_lines}: use 1 to {MAX_LINES}")
    if not 3 <= shape.num_symbols <= MAX_SYMBOLS:
        raise ValueError(f"environment.options.num_symbols = {shape.num_symbols}: use 3 to {MAX_SYMBOLS}")


def make_task(shape: Shape, split: Split, index: int) -> Task:
    """Task ``index`` of the split; any index from 0 of "train", those below NUM_EVALUATION_TASKS of "evaluation".

    Raises:
        ValueError: there is no such task.
    """
    if index < 0 or (split == "evaluation" and index >= NUM_EVALUATION_TASKS):
        raise ValueError(
            f"there is no {split} task {index}; evaluation tasks are 0 to {NUM_EVALUATION_TASKS - 1}"
        )
    draws = random.Random(f"bugfix/{split}/{index}")  # seeded by text: the same in every process
    while True:
        task = _draw(shape, draws)
        if split_of(task) == split:
            return task


def split_of(task: Task) -> Split:
    """The only split in which this instance occurs."""
    content = bytes((*task.broken, task.line, task.needed))
    first_byte = hashlib.blake2b(content, digest_size=1).digest()[0]
    return "evaluation" if first_byte < 256 * EVALUATION_SHARE else "train"


def _draw(shape: Shape, draws: random.Random) -> Task:
    broken = tuple(draws.randrange(shape.num_symbols) for _ in range(shape.num_lines))
    line = draws.randrange(shape.num_lines)
    other = draws.randrange(shape.num_symbols - 1)
    return Task(broken, line, other + (other >= broken[line]))
