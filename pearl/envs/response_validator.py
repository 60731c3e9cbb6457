"""What environment code returned, checked before it is sent: nothing it can return hurts more than its own episode.

A too long observation keeps its beginning and its end in equal parts, with the tokenizer's marker between them when
it has one: the beginning says what came, the end has the latest output and the template's glue.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pearl.envs.protocol import EnvironmentSpec, Observation
from pearl.types.messages.training import Demonstration


class BadAnswerError(Exception):
    """Environment code returned something that is not what its protocol promises."""


class ValidatedObservation(NamedTuple):
    ids: bytes
    reward: float
    done: bool


class ResponseValidator:
    def __init__(self, spec: EnvironmentSpec, max_prompt_tokens: int, max_observation_tokens: int) -> None:
        self._spec = spec
        self._max_prompt_tokens = max_prompt_tokens
        self._max_observation_tokens = max_observation_tokens

    def prompt(self, ids: object) -> bytes:
        """A prompt is not shortened: a task with a part missing is another task."""
        checked = _as_list(ids, "reset")
        if not checked:
            raise BadAnswerError("reset returned no ids: a prompt has at least one")
        if len(checked) > self._max_prompt_tokens:
            raise BadAnswerError(
                f"the prompt has {len(checked)} ids, rollout.max_context_tokens = {self._max_prompt_tokens}"
            )
        return self._pack(checked, "reset")

    def observation(self, answer: object) -> ValidatedObservation:
        if not isinstance(answer, Observation):
            raise BadAnswerError(f"step returned {type(answer).__name__}, not an Observation")
        reward = answer.reward
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise BadAnswerError(f"step returned the reward {reward!r}: a finite number is needed")
        if not isinstance(answer.done, bool):
            raise BadAnswerError(f"step returned done = {answer.done!r}: True or False is needed")
        ids = self._shortened(_as_list(answer.ids, "step"))
        return ValidatedObservation(self._pack(ids, "step"), float(reward), answer.done)

    def demonstration(self, ids: object, weights: object) -> Demonstration:
        packed = self._pack(_as_list(ids, "demonstrations"), "demonstrations")
        loss_weights = np.asarray(weights, dtype="<f4")
        if loss_weights.nbytes != len(packed) or not np.isfinite(loss_weights).all():
            raise BadAnswerError("demonstrations needs one finite loss weight for each id")
        return Demonstration(packed, loss_weights.tobytes())

    def _shortened(self, ids: list[int]) -> list[int]:
        limit, cut_id = self._max_observation_tokens, self._spec.cut_id
        if len(ids) <= limit:
            return ids
        marker = [] if cut_id is None else [cut_id]
        num_head = (limit - len(marker)) // 2
        num_tail = limit - len(marker) - num_head
        return ids[:num_head] + marker + ids[len(ids) - num_tail :]

    def _pack(self, ids: list[int], method: str) -> bytes:
        size = self._spec.vocabulary_size
        for position, number in enumerate(ids):
            if type(number) is not int or not 0 <= number < size:
                raise BadAnswerError(
                    f"{method} returned {_brief(number)} at position {position}: ids are integers from 0 to {size - 1}"
                )
        return np.array(ids, dtype="<i4").tobytes()


def _as_list(ids: object, method: str) -> list[int]:
    """Only the type of the whole is looked at here, so that a flood costs nothing."""
    if isinstance(ids, Mapping):  # what transformers gives, whose ids are one of several fields
        raise BadAnswerError(
            f"{method} returned {type(ids).__name__}, not a list of ids: with apply_chat_template, set "
            "tokenize=True, return_dict=False"
        )
    if not isinstance(ids, list):
        raise BadAnswerError(f"{method} returned {type(ids).__name__}: a list of ids is needed")
    return ids


def _brief(value: object) -> str:
    """What is worth saying of a value of any size: ``repr`` of a huge one would be a flood of its own."""
    if isinstance(value, int | float):
        return repr(value)
    return type(value).__name__
