"""What the start's comparison of training with plain ``transformers``, and the bound on the gap, find in a trainer that
is changed on purpose, one thing at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from training_worlds import MODEL, VOCABULARY, in_world, make_samples, trainer, with_training

from pearl.core.pipeline.agreement import GapSums, disagreement
from pearl.types.comparison import Comparison
from pearl.types.config import Config, ModelConfig, RolloutConfig
from pearl.types.events import TrainFinished
from pearl.types.ids import Incarnation, OpId
from pearl.types.messages.training import Sample
from pearl.workers.model import build_model
from pearl.workers.training import packing
from pearl.workers.training.comparison import compare
from pearl.workers.training.fsdp import local_shard
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

Change = Callable[[Any], object]
ROLLOUT = RolloutConfig(temperature=0.7, max_context_tokens=120)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    directory: Path = tmp_path_factory.mktemp("model")
    spread = msgspec.structs.replace(MODEL, initializer_range=0.2)
    build_model(spread, VOCABULARY, 1).save_pretrained(directory)
    return msgspec.structs.replace(
        with_training(), model=ModelConfig(path=str(directory), device="cpu"), rollout=ROLLOUT
    )


def comparison(
    config: Config, root: Path, before: Change | None = None, after: Change | None = None
) -> Comparison | None:
    """On every rank: ``before`` changes the trainer before it publishes, ``after`` when it has."""
    own = trainer(config, root)
    own.begin(0, ())
    if before is not None:
        before(own)
    is_first = torch.distributed.get_rank() == 0
    snapshot = own.publish(SnapshotStore(1, 0, "here", 1 << 14) if is_first else None)
    if after is not None:
        after(own)
    return compare(own, config, VOCABULARY, snapshot, is_untrained=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sound_trainer_agrees_to_rounding(config: Config, tmp_path: Path, num_ranks: int) -> None:
    found, *others = in_world(num_ranks, comparison, config, tmp_path)
    assert (found.error, found.skipped) == ("", "")
    assert found.num_tokens > 100
    assert 0.0 < found.max_gap < 1e-5
    assert others == [None] * (num_ranks - 1)


def other_rope(own: Any) -> None:
    own.policy.model.model.rotary_emb.inv_freq.mul_(0.9)


def other_epsilon(own: Any) -> None:
    for module in own.policy.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def no_layer(own: Any) -> None:
    own.policy.model.model.layers[1].forward = lambda hidden_states, **_: hidden_states


def neighbours(own: Any) -> None:
    """Sequences of a row see each other."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def unmasked(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS[packing.NAME] = unmasked


def other_temperature(own: Any) -> None:
    rollout = msgspec.structs.replace(own._config.rollout, temperature=0.75)
    own._config = msgspec.structs.replace(own._config, rollout=rollout)


def one_weight(own: Any) -> None:
    with torch.no_grad():
        local_shard(own.policy.tensors()[3][1]).view(-1)[:1] += 1e-3


@pytest.mark.parametrize("change", [other_rope, other_epsilon, no_layer, neighbours, other_temperature])
def test_a_trainer_that_computes_another_model_is_found(
    config: Config, tmp_path: Path, change: Change
) -> None:
    (found,) = in_world(1, comparison, config, tmp_path, None, change)
    assert f"training does not compute the model {config.model.path!r}" in found.error
    assert "nats on average" in found.error


def test_weights_that_are_not_those_of_the_directory_are_found(config: Config, tmp_path: Path) -> None:
    """Trainer and engine would agree on them."""
    (found,) = in_world(1, comparison, config, tmp_path, one_weight)
    assert "training published 'model.layers.0.mlp.gate_proj.weight' otherwise than" in found.error


# within a step


def stepped(config: Config, root: Path, rollout_seed: int, change: Change | None = None) -> str:
    """A step on tokens with the log-probs of the model of ``rollout_seed`` -> why the run would end."""
    own = trainer(config, root)
    own.begin(0, ())
    if change is not None:
        change(own)
    result = own.train(0, [with_logprobs(sample, config, rollout_seed) for sample in make_samples(16)])
    event = TrainFinished(
        OpId(1),
        Incarnation(1),
        own.version,
        "",
        None,
        result.metrics,
        result.max_logprob_gap,
        result.logprob_gap_tokens,
    )
    return disagreement(event, GapSums(), config)


def with_logprobs(sample: Sample, config: Config, seed: int) -> Sample:
    """As an engine with the weights of ``seed`` would have told them."""
    model = build_model(config.model, VOCABULARY, seed)
    ids = torch.from_numpy(np.frombuffer(sample.ids, "<i4").astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / config.rollout.temperature
    rows = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    mask = np.frombuffer(sample.mask, np.uint8)
    logprobs = np.concatenate([[0.0], rows.numpy()]) * mask
    return msgspec.structs.replace(sample, logprobs=logprobs.astype("<f4").tobytes())


def plain(config: Config) -> Config:
    """The built-in model, whose weights follow from a seed."""
    model = msgspec.structs.replace(MODEL, initializer_range=0.2)
    return msgspec.structs.replace(config, model=model, run=msgspec.structs.replace(config.run, seed=1))


def test_tokens_of_the_version_being_trained_end_no_run(config: Config, tmp_path: Path) -> None:
    assert in_world(1, stepped, plain(config), tmp_path, 1) == [""]


def test_tokens_of_stale_weights_under_the_new_version_end_the_run_at_its_first_step(
    config: Config, tmp_path: Path
) -> None:
    (said,) = in_world(1, stepped, plain(config), tmp_path, 2)
    assert said.startswith("step 0: rollout and training do not compute the same model")


@pytest.mark.parametrize("change", [other_rope, no_layer, other_temperature])
def test_a_trainer_that_changes_during_the_run_ends_it_within_a_step(
    config: Config, tmp_path: Path, change: Change
) -> None:
    (said,) = in_world(1, stepped, plain(config), tmp_path, 1, change)
    assert "nats on average, agreement.max_logprob_gap is 0.001" in said
