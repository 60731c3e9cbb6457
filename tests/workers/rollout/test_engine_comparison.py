"""What the comparison of an engine with plain ``transformers`` finds: engines changed on purpose, one by one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_support import VOCABULARY, Image, image, reference
from transformers import PreTrainedModel

from pearl.types.comparison import Comparison
from pearl.types.config import AgreementConfig, Config, ModelConfig, RolloutConfig
from pearl.types.weights import BucketSpec, Snapshot
from pearl.workers.model import build_model
from pearl.workers.rollout.comparison import EngineComparison
from pearl.workers.rollout.torch_engine import core, runner, sampler
from pearl.workers.rollout.torch_engine.attention import NAME
from pearl.workers.rollout.torch_engine.engine import TorchEngine
from pearl.workers.rollout.torch_engine.settings import EngineSettings
from pearl.workers.rollout.torch_engine.weights import IncomingWeights
from pearl.workers.rollout.weight_loader import WeightLoader

Change = Callable[[Any], object]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    directory: Path = tmp_path_factory.mktemp("model")
    reference(1).save_pretrained(directory)
    return Config(
        model=ModelConfig(path=str(directory), device="cpu"),
        rollout=RolloutConfig(temperature=0.8, max_context_tokens=200),
    )


class Arrived:
    """A snapshot in this process's memory."""

    seconds = 0.0

    def __init__(self, version: Image) -> None:
        buckets = version.buckets(1 << 14)
        self._buckets = buckets
        self.snapshot = Snapshot(
            version.version,
            len(version.data),
            version.tensors,
            tuple(bucket for bucket, _ in buckets),
            (),
            version.checksum,
        )

    def __iter__(self) -> Iterator[tuple[BucketSpec, memoryview]]:
        return iter(self._buckets)

    def __enter__(self) -> "Arrived":
        return self

    def __exit__(self, *_: object) -> None: ...


class Receiver:
    async def receive_async(self, snapshot: Snapshot, **_: Any) -> Arrived:
        return Arrived(image(snapshot.version.step))


async def compared(config: Config, change: Change | None = None, after: Change | None = None) -> Comparison:
    """Of an engine that was built with ``change``, and changed by ``after`` when it had its weights."""
    built: list[PreTrainedModel] = []

    def build() -> PreTrainedModel:
        model = build_model(config.model, VOCABULARY, 0)
        if change is not None:
            change(model)
        built.append(model)
        return model

    engine = TorchEngine(build, EngineSettings(prefill_chunk_tokens=64))
    await engine.start()
    try:
        comparison = EngineComparison(config, VOCABULARY, engine)

        async def quiet() -> None:
            await engine.pause("abort")

        loader = WeightLoader(engine, Receiver(), "auto")
        await loader.take(Arrived(image(1)).snapshot, 1.0, quiet, comparison.keep)
        if after is not None:
            with torch.no_grad():
                after(built[0])
        await engine.continue_generation()
        return await comparison.run()
    finally:
        await engine.shutdown()


async def test_a_sound_engine_agrees_to_rounding(config: Config) -> None:
    found = await compared(config)
    assert (found.error, found.skipped) == ("", "")
    assert (found.num_tokens, found.generated_tokens) == (48, 48)
    assert 0.0 < found.max_gap < 1e-5


def drop_a_layer(model: Any) -> None:
    model.model.layers[1].forward = lambda hidden_states, **_: hidden_states


def shift_positions(model: Any) -> None:
    """Of what is decoded, as an engine would that counts from the wrong end of its KV."""

    def shift(module: Any, arguments: Any, options: dict[str, Any]) -> Any:
        positions = options["position_ids"]
        return arguments, options | {"position_ids": positions + (positions >= 190)}

    model.register_forward_pre_hook(shift, with_kwargs=True)


def other_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.9)


def other_epsilon(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def other_weight(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.mul_(1.01)


@pytest.mark.parametrize("change", [drop_a_layer, shift_positions, other_rope, other_epsilon])
async def test_an_engine_that_computes_another_model_is_found(config: Config, change: Change) -> None:
    found = await compared(config, change)
    assert f"the torch engine does not compute the model {config.model.path!r}" in found.error
    assert "at position" in found.error
    assert "nats on average" in found.error


async def test_a_weight_that_is_not_the_published_one_is_found(config: Config) -> None:
    assert "does not compute the model" in (await compared(config, after=other_weight)).error


async def test_a_mask_that_hides_too_much_is_found(config: Config, monkeypatch: Patch) -> None:
    """Only the long prompt shows it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[NAME]

    def forgetful(*arguments: Any, store: Any, layout: Any, **options: Any) -> Any:
        result = original(*arguments, store=store, layout=layout, **options)
        for keys, _ in store.layers.values():
            keys.flatten(1, 2)[:, 16:48] = 0.0  # as if nobody saw a page of each of the first requests
        return result

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, NAME, forgetful)
    assert "does not compute the model" in (await compared(config)).error


async def test_another_temperature_is_found(config: Config, monkeypatch: Patch) -> None:
    original = sampler.sample
    monkeypatch.setattr(runner, "sample", lambda logits, t, uniforms: original(logits, t * 1.05, uniforms))
    assert "does not compute the model" in (await compared(config)).error


async def test_a_sampler_that_draws_otherwise_is_found_though_its_log_probs_are_right(
    config: Config, monkeypatch: Patch
) -> None:
    original = sampler.sample
    monkeypatch.setattr(runner, "sample", lambda logits, t, uniforms: original(logits, t, 1.0 - uniforms))
    found = await compared(config)
    assert "the torch engine does not draw from the distribution" in found.error
    assert found.max_gap < 1e-5


async def test_a_greedy_answer_that_is_not_the_best_is_found(config: Config, monkeypatch: Patch) -> None:
    original = sampler.sample

    def lukewarm(logits: torch.Tensor, temperatures: Any, uniforms: Any) -> Any:
        found = original(logits, np.where(temperatures == 0.0, 1.0, temperatures), uniforms)
        return found

    monkeypatch.setattr(runner, "sample", lukewarm)
    assert "a greedy answer" in (await compared(config)).error


async def test_a_dropped_update_is_refused_by_its_checksum(config: Config, monkeypatch: Patch) -> None:
    monkeypatch.setattr(IncomingWeights, "load", lambda self: None)
    with pytest.raises(ValueError, match="after loading, published"):
        await compared(config, lambda model: take_weights_of(model, 2))


async def test_a_stale_version_under_the_checksum_of_the_new_one_is_found(
    config: Config, monkeypatch: Patch
) -> None:
    """The engine's own checksum is what lies here."""
    monkeypatch.setattr(IncomingWeights, "load", lambda self: None)
    monkeypatch.setattr(core, "model_checksum", lambda model: image(1).checksum)
    found = await compared(config, lambda model: take_weights_of(model, 2))
    assert "does not compute the model" in found.error


def take_weights_of(model: PreTrainedModel, seed: int) -> None:
    model.load_state_dict(reference(seed).state_dict())


async def test_a_model_that_is_too_large_is_not_compared_and_that_is_said(config: Config) -> None:
    small = msgspec.structs.replace(config, agreement=AgreementConfig(max_model_bytes=1000))
    found = await compared(small)
    assert "agreement.max_model_bytes allows 0" in found.skipped
    assert (found.num_tokens, found.error) == (0, "")


async def test_a_directory_that_transformers_cannot_read_is_an_error(config: Config, tmp_path: Path) -> None:
    engine = TorchEngine(lambda: build_model(config.model, VOCABULARY, 0), EngineSettings())
    elsewhere = msgspec.structs.replace(config, model=ModelConfig(path=str(tmp_path)))
    comparison = EngineComparison(elsewhere, VOCABULARY, engine)
    comparison.keep(Arrived(image(1)))
    assert "transformers' own model cannot be had" in (await comparison.run()).error


async def test_weights_of_another_model_are_an_error(config: Config) -> None:
    whole = image(1)
    engine = TorchEngine(lambda: build_model(config.model, VOCABULARY, 0), EngineSettings())
    comparison = EngineComparison(config, VOCABULARY, engine)
    comparison.keep(Arrived(replace(whole, tensors=whole.tensors[1:])))
    assert f"do not both have {whole.tensors[0].name!r}" in (await comparison.run()).error
