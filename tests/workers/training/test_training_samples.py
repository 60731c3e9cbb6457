import math

import msgspec
import numpy as np
import pytest
import torch
from training_worlds import VOCABULARY, make_sample

from pearl.types.messages.training import Sample
from pearl.workers.training.packing import pack
from pearl.workers.training.samples import unpack
from pearl.workers.training.step_metrics import sample_metrics

MASK = [False] * 3 + [True] * 4 + [False] * 3 + [True] * 5
PLACES = [3, 4, 5, 6, 10, 11, 12, 13, 14]


def hand_made() -> Sample:
    return make_sample(0, 0, 1.0, list(range(15)), MASK, [-0.5 if flag else 0.0 for flag in MASK])


@pytest.mark.scenario("TK-04")
def test_mask_is_exactly_the_generated_places() -> None:
    [sample] = unpack([hand_made()], VOCABULARY)
    assert sample.positions.tolist() == PLACES
    assert sample.num_trained == 9
    assert sample_metrics([sample])["tokens_trained"] == 9


@pytest.mark.scenario("TK-04")
def test_each_generated_token_is_predicted_from_the_place_before() -> None:
    [sample] = unpack([hand_made()], VOCABULARY)
    other = unpack([make_sample(1, 0, 0.0, [9, 8, 7], [False, False, True], [0, 0, -1.0])], VOCABULARY)[0]
    packed = pack([sample.ids, other.ids], [sample.positions, other.positions], torch.device("cpu"))
    assert packed.queries_M.tolist() == [place - 1 for place in PLACES] + [14 + 1]
    assert packed.targets_M.tolist() == [*PLACES, 7]  # the ids count upwards, so each target is its place
    assert packed.ids_T.tolist() == [*range(14), 9, 8]
    assert packed.positions_T.tolist() == [*range(14), 0, 1]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.scenario("LP-02")
def test_a_log_prob_that_is_not_finite_masks_its_sample(bad: float) -> None:
    logprobs = [-0.5 if flag else 0.0 for flag in MASK]
    logprobs[4] = bad
    sample = unpack([make_sample(0, 0, 1.0, list(range(15)), MASK, logprobs)], VOCABULARY)[0]
    assert sample.masked
    assert sample.invalid
    assert sample.num_trained == 0


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": np.zeros(14, "<f4").tobytes()},  # one is missing
        {"mask": b""},
        {"reward": math.nan},
        {"reward": math.inf},
        {"reward": 1e300},
        {"ids": np.full(15, VOCABULARY, "<i4").tobytes()},
        {"mask": bytes([1] * 15)},  # nothing comes before the first token
    ],
)
@pytest.mark.scenario("LP-02")
def test_unusable_numbers_mask_only_their_sample(change: dict[str, object]) -> None:
    broken = msgspec.structs.replace(hand_made(), trajectory=1, **change)
    samples = unpack([broken, hand_made()], VOCABULARY)
    assert [sample.invalid for sample in samples] == [False, True]
    metrics = sample_metrics(samples)
    assert (metrics["samples_invalid"], metrics["samples_masked"]) == (1, 1)
    msgspec.json.encode(metrics)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_sample_masked_by_the_coordinator_is_not_counted_as_invalid() -> None:
    sample = unpack([Sample(3, 0, 0.0, True, 0, b"", b"", b"", b"")], VOCABULARY)[0]
    assert (sample.masked, sample.invalid, sample.num_trained) == (True, False, 0)


def test_samples_are_used_in_trajectory_order() -> None:
    samples = [msgspec.structs.replace(hand_made(), trajectory=t) for t in (5, 1, 3)]
    assert [sample.trajectory for sample in unpack(samples, VOCABULARY)] == [1, 3, 5]
