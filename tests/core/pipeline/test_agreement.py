"""When a run ends because rollout and training do not compute the same model, and when it must not."""

from typing import Any

import pytest

from pearl.core.pipeline.agreement import MIN_TOKENS, GapSums, disagreement
from pearl.types.config import AgreementConfig, Config, ModelConfig, RolloutConfig
from pearl.types.events import TrainFinished
from pearl.types.ids import Incarnation, OpId
from pearl.types.weights import Version

CONFIG = Config(model=ModelConfig(path="/models/m"), rollout=RolloutConfig(engine="sglang"))
BFLOAT16 = Config(model=ModelConfig(dtype="bfloat16"))


def step(gap: float | None, tokens: int, **metrics: float) -> TrainFinished:
    found = metrics if gap is None else {**metrics, "logprob_gap_mean": gap}
    return TrainFinished(OpId(1), Incarnation(1), Version(0, 4), "", None, found, 9.9, tokens)


def test_a_gap_over_the_bound_names_model_engine_step_and_size() -> None:
    said = disagreement(step(14.3, 384), GapSums(), CONFIG)
    assert said.startswith("step 3: ")
    assert all(word in said for word in ("'/models/m'", "'sglang'", "14.3 nats", "agreement.max_logprob_gap"))


@pytest.mark.parametrize(("config", "sound", "broken"), [(CONFIG, 1e-4, 2e-3), (BFLOAT16, 0.03, 0.2)])
def test_the_bound_is_that_of_the_dtype(config: Config, sound: float, broken: float) -> None:
    assert disagreement(step(sound, 1000), GapSums(), config) == ""
    assert disagreement(step(broken, 1000), GapSums(), config) != ""


def test_the_bound_can_be_set() -> None:
    config = Config(agreement=AgreementConfig(max_logprob_gap=0.5))
    assert disagreement(step(0.4, 1000), GapSums(), config) == ""
    assert "max_logprob_gap is 0.5" in disagreement(step(0.6, 1000), GapSums(), config)


def test_the_largest_gap_of_one_token_is_no_reason() -> None:
    assert disagreement(step(1e-5, 1000), GapSums(), CONFIG) == "", "its largest is 9.9"


def test_few_tokens_wait_for_those_of_later_steps() -> None:
    sums = GapSums()
    few = MIN_TOKENS // 2 - 1
    assert disagreement(step(1.0, few), sums, CONFIG) == ""
    assert disagreement(step(1.0, few), sums, CONFIG) == ""
    assert f"of {3 * few} tokens" in disagreement(step(1.0, few), sums, CONFIG)
    assert sums == GapSums()


def test_a_gap_that_is_no_number_is_one() -> None:
    assert "of 3 tokens is not finite" in disagreement(step(None, 3), GapSums(), CONFIG)
    assert disagreement(step(None, 0), GapSums(), CONFIG) == "", "there was nothing to compare"


def test_tokens_of_older_versions_end_a_run_only_by_their_weight() -> None:
    """None of the step's tokens was made by the version that was trained."""
    aged = {"tis_mean": 0.8, "tokens_trained": 5000.0}
    assert disagreement(step(0.0, 0, **aged), GapSums(), CONFIG) == ""
    said = disagreement(step(0.0, 0, **(aged | {"tis_mean": 0.17})), GapSums(), CONFIG)
    assert "the mean importance weight of 5000 tokens is 0.17" in said
    few: dict[str, Any] = {"tis_mean": 0.17, "tokens_trained": MIN_TOKENS - 1.0}
    assert disagreement(step(0.0, 0, **few), GapSums(), CONFIG) == ""
