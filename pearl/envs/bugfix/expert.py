"""Demonstrations for the supervised start. They teach every skill, and on purpose not the habit of using it.

All of them test first. Some then look at the failing line and make the right edit; the others edit at once, which is
a guess. The loss weight of the looking action is low, so the model learns what to do after a look far better than to
look: what remains to be learnt from reward is the habit.
"""

import random
from typing import NamedTuple

from pearl.envs.bugfix.actions import Action, Edit, Submit, Test, View, render
from pearl.envs.bugfix.episode import Repair
from pearl.envs.bugfix.task import Shape, Task, make_task

FIRST_TASK = 1 << 40
"""Demonstrations use train tasks from here on: no run's own training gets that far."""


class ExpertMix(NamedTuple):
    look_ratio: float  # of the demonstrations look before they edit
    look_weight: float  # loss weight of the tokens of looking; all other actions weigh 1


def demonstrate(
    shape: Shape, habit: ExpertMix, seed: int, index: int
) -> tuple[list[int], list[float], float]:
    """(ids, loss weight a position, reward) of demonstration ``index``; the same for the same arguments."""
    task = make_task(shape, "train", FIRST_TASK + index)
    draws = random.Random(f"bugfix/expert/{seed}/{index}")
    repair = Repair(task, shape)
    ids = repair.prompt()
    weights = [0.0] * len(ids)
    reward = 0.0
    for action in _plan(task, shape, habit, draws):
        said = render(action)
        weight = habit.look_weight if isinstance(action, View) else 1.0
        seen = repair.act(said)
        ids += said + seen.ids
        weights += [weight] * len(said) + [0.0] * len(seen.ids)
        reward = seen.reward
    return ids, weights, reward


def solution(task: Task) -> list[list[int]]:
    """The turns that repair the task without a guess."""
    actions: list[Action] = [Test(), View(task.line), Edit(task.line, task.needed), Submit()]
    return [render(action) for action in actions]


def _plan(task: Task, shape: Shape, habit: ExpertMix, draws: random.Random) -> list[Action]:
    if draws.random() < habit.look_ratio:
        return [Test(), View(task.line), Edit(task.line, task.needed), Submit()]
    guess = draws.randrange(shape.num_symbols - 1)
    return [Test(), Edit(task.line, guess + (guess >= task.broken[task.line])), Submit()]
