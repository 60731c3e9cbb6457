"""What environment code returned, checked before it is sent: nothing it can return hurts more than its own episode.

A too long observation keeps its beginning and its end in equal parts, with the tokenizer's marker between them when
it has one: the beginning says what came, the end has the latest output and the template's glue.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pearl.envs.protocol import EnvironmentSpec, Observation
from pearl.types.error_text import error_text, escaped
from pearl.types.messages.environment import MAX_REWARD
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
        reward = as_reward(answer.reward, "step")
        if not isinstance(answer.done, bool | np.bool_):
            raise BadAnswerError(f"step returned done = {_brief(answer.done)}: True or False is needed")
        ids = self._shortened(_as_list(answer.ids, "step"))
        return ValidatedObservation(self._pack(ids, "step"), reward, bool(answer.done))

    def demonstration(self, ids: object, weights: object) -> Demonstration:
        packed = self._pack(_as_list(ids, "demonstrations"), "demonstrations")
        try:
            loss_weights = np.asarray(weights, dtype="<f4")
        # Foreign objects are converted here, and may raise anything.
        except Exception as error:
            raise BadAnswerError(
                f"demonstrations returned loss weights that are no numbers: {error_text(error)}"
            ) from error
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


def as_reward(value: object, source: str) -> float:
    """Convert what ``source`` returned as a reward, of any type that stands for one real number.

    Those are int, float, bool, Decimal, Fraction, NumPy scalars and 0-d tensors.
    """
    try:
        is_one = not isinstance(value, str | bytes | bytearray | complex | np.complexfloating)
        number = float(value) if is_one and _is_scalar(value) else None  # type: ignore[arg-type]
    except OverflowError:  # an int or a Decimal beyond all floats
        number = math.inf
    # Foreign objects are converted here, and may raise anything.
    except Exception as error:
        raise BadAnswerError(
            f"{source} returned the reward {_brief(value)}, which gives no number: {error_text(error)}"
        ) from error
    if number is None:
        raise BadAnswerError(f"{source} returned the reward {_brief(value)}: a finite real number is needed")
    if not math.isfinite(number):
        raise BadAnswerError(f"{source} returned the reward {number}: a finite real number is needed")
    if abs(number) > MAX_REWARD:
        raise BadAnswerError(
            f"{source} returned the reward {number:g}: its magnitude may be at most {MAX_REWARD:g}; scale rewards down"
        )
    return number


def _is_scalar(value: object) -> bool:
    """Whether it converts to one float: an array of one element would too, but is no scalar."""
    return (hasattr(value, "__float__") or hasattr(value, "__index__")) and getattr(value, "ndim", 0) == 0


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
    """Return a short text for a value of any size: ``repr`` of a huge one would flood the log."""
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return repr(value)
    return escaped(type(value).__name__, 100)
