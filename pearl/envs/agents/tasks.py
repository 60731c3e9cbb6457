"""The tasks of an agent: lines of a JSONL file, or what a function called ``tasks`` in the agent's module returns."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pearl.envs.protocol import Split


class TaskSets(msgspec.Struct, frozen=True):
    train: Sequence[Any]
    evaluation: Sequence[Any]

    def get(self, split: Split, task: int) -> Any:
        return (self.train if split == "train" else self.evaluation)[task]


TASK_OPTIONS = ("tasks", "evaluation_tasks")


def load_tasks(options: Mapping[str, object], function: Callable[[Split], Sequence[Any]] | None) -> TaskSets:
    """Load the tasks of ``environment.options.tasks`` and ``.evaluation_tasks``; the function gives what they do
    not."""
    train = _read(options, "tasks", function, "train")
    if not train:
        raise ValueError(
            "environment.options.tasks: there are no tasks to train on; name a JSONL file with one task a line, or "
            'write a function tasks(split) beside the agent that returns a list for "train" and for "evaluation"'
        )
    return TaskSets(train, _read(options, "evaluation_tasks", function, "evaluation"))


def _read(
    options: Mapping[str, object], key: str, function: Callable[[Split], Sequence[Any]] | None, split: Split
) -> Sequence[Any]:
    path = options.get(key)
    if path is not None:
        return _read_lines(key, str(path))
    if function is None:
        return ()
    made = function(split)
    if inspect.isawaitable(made) or not isinstance(made, Sequence):
        raise ValueError(f'tasks("{split}") returned {type(made).__name__}: a list is needed')
    return made


def _read_lines(key: str, path: str) -> list[Any]:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f'environment.options.{key} = "{path}": cannot be read: {error.strerror}; '
            "a relative path counts from where pearl was started"
        ) from None
    tasks = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                tasks.append(msgspec.json.decode(line))
            except msgspec.DecodeError as error:
                raise ValueError(f'environment.options.{key} = "{path}": line {number}: {error}') from None
    return tasks
