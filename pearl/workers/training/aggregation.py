"""How the losses of tokens become one number: the share of each token, by what is known of the whole batch.

A share depends on no cut of the batch; the loss of a batch is the sum over its tokens of share times loss.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Aggregation = Literal["token", "trajectory", "constant", "prompt"]


def token_shares(
    aggregation: Aggregation,
    num_tokens: Sequence[int],
    groups: Sequence[int],
    constant: int,
) -> npt.NDArray[np.float64]:
    """The share of a token of each trajectory; ``num_tokens`` trained ones a trajectory, 0 where it is not trained.

    - token: the mean over all tokens, so that long trajectories count more.
    - trajectory: the mean over trajectories of their tokens' means.
    - constant: as trajectory, with ``constant`` in place of each one's own length, which favours no length.
    - prompt: the mean over prompts of the mean over all tokens of a prompt's trajectories.
    """
    tokens_S = np.asarray(num_tokens, np.float64)
    is_trained_S = tokens_S > 0
    num_trained = max(1, int(is_trained_S.sum()))
    divisor_S = np.maximum(tokens_S, 1)
    match aggregation:
        case "token":
            divisor_S = np.full(len(tokens_S), max(1.0, tokens_S.sum()))
        case "trajectory":
            divisor_S = divisor_S * num_trained
        case "constant":
            divisor_S = np.full(len(tokens_S), float(constant * num_trained))
        case "prompt":
            groups_S = np.asarray(groups)
            of_group = {group: tokens_S[groups_S == group].sum() for group in set(groups)}
            num_prompts = max(1, sum(total > 0 for total in of_group.values()))
            divisor_S = np.array([max(1.0, of_group[group]) for group in groups]) * num_prompts
    return np.where(is_trained_S, 1 / divisor_S, 0.0)
