"""The environment as the worker sees it: tasks, episodes, demonstrations and what the model must know."""

from collections.abc import Sequence

from pearl.envs.bugfix import tokenizer as words
from pearl.envs.bugfix.episode import BugfixEpisode
from pearl.envs.bugfix.expert import ExpertMix, demonstrate, solution
from pearl.envs.bugfix.task import NUM_EVALUATION_TASKS, Shape, check_shape, make_task
from pearl.envs.protocol import EnvironmentSpec, Split


class BugfixEnvironment:
    def __init__(
        self,
        *,
        num_lines: int = 4,
        num_symbols: int = 10,
        look_ratio: float = 0.6,
        look_weight: float = 0.13,
    ) -> None:
        """The keywords are ``environment.options``. ValueError names the one that is out of range."""
        self._shape = Shape(num_lines, num_symbols)
        self._habit = ExpertMix(_ratio("look_ratio", look_ratio), _ratio("look_weight", look_weight))
        check_shape(self._shape)

    def describe(self) -> EnvironmentSpec:
        return EnvironmentSpec(
            vocabulary_size=len(words.WORDS),
            stop_ids=(words.END,),
            pad_id=words.PAD,
            num_train_tasks=0,
            num_evaluation_tasks=NUM_EVALUATION_TASKS,
            can_restore=True,
            cut_id=words.CUT,
        )

    def episode(self, split: Split, task: int) -> BugfixEpisode:
        return BugfixEpisode(make_task(self._shape, split, task), self._shape)

    def solve(self, split: Split, task: int) -> list[list[int]]:
        return solution(make_task(self._shape, split, task))

    def decode(self, ids: Sequence[int]) -> str:
        return words.decode(ids)

    def demonstrations(self, seed: int, first: int, count: int) -> list[tuple[list[int], list[float]]]:
        made = (demonstrate(self._shape, self._habit, seed, first + offset) for offset in range(count))
        return [(ids, weights) for ids, weights, _ in made]


def _ratio(key: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"environment.options.{key} = {value}: a share, use 0 to 1")
    return value
