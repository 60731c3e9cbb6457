"""A mixture of experts in SGLang: the experts that it serves are those of the update, and nothing serves without."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import engine_contract
import pytest
import pytest_asyncio
import sglang_support
import torch
from engine_support import Image, greedy_reference, ids, reference_logprobs, request
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from pearl.types.config import ModelConfig
from pearl.types.weights import Version
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import SglangSettings
from pearl.workers.weight_transfer.checksum import canonical_tensors, dtype_name, model_checksum, tensor_bytes
from pearl.workers.weight_transfer.snapshot_layout import image_bytes, lay_out

pytestmark = [
    pytest.mark.skipif(bool(sglang_support.why_not()), reason=sglang_support.why_not()),
    pytest.mark.timeout(300),  # the first test starts the server
]
VOCABULARY = 64


def experts(seed: int) -> Any:
    settings = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # type: ignore[call-arg]
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # spread: attention and experts count
                parameter.normal_(0, 1.6 / parameter.shape[-1] ** 0.5)
    return model.train(False)


def image_of(model: Any, number: int) -> Image:
    tensors = canonical_tensors(model)
    specs = lay_out((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors)
    data = bytearray(image_bytes(specs))
    for spec, (_, tensor) in zip(specs, tensors, strict=True):
        data[spec.offset : spec.offset + spec.num_bytes] = tensor_bytes(tensor)
    return Image(Version(0, number), specs, bytes(data), model_checksum(model))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory: Path = tmp_path_factory.mktemp("experts")
    experts(0).config.save_pretrained(directory)
    content = (directory / "config.json").read_text()
    if '"architectures"' not in content:
        (directory / "config.json").write_text(
            content.replace("{", '{"architectures": ["Qwen3MoeForCausalLM"],', 1)
        )
    return ModelConfig(path=str(directory))


@pytest.fixture(scope="module")
def server(config: ModelConfig) -> Iterator[tuple[Server, SglangSettings]]:
    with sglang_support.running_servers("colocated", model=config, vocabulary_size=VOCABULARY) as (found,):
        yield found


@pytest_asyncio.fixture
async def subject(
    server: tuple[Server, SglangSettings], config: ModelConfig
) -> AsyncIterator[engine_contract.Subject]:
    async with sglang_support.engine_on(*server, model=config, vocabulary_size=VOCABULARY) as engine:
        yield engine_contract.Subject(engine, lambda seed: image_of(experts(seed), seed))


async def test_greedy_ids_are_those_of_transformers_after_two_updates(
    subject: engine_contract.Subject,
) -> None:
    for seed in (1, 2):
        model = experts(seed)
        await subject.take(seed)
        assert await subject.engine.checksum() == model_checksum(model)
        prompts = {attempt: ids(attempt, 40) for attempt in range(10 * seed, 10 * seed + 3)}
        await subject.generate(*[request(a, prompt, 24, temperature=0.0) for a, prompt in prompts.items()])
        found = await subject.finished(*prompts)
        for attempt, prompt in prompts.items():
            assert found[attempt].ids == greedy_reference(model, prompt, 24)
            expected = reference_logprobs(model, prompt, found[attempt].ids)
            assert found[attempt].logprobs == pytest.approx(expected, abs=1e-4)


async def test_without_its_experts_an_update_fails_with_their_names_and_nothing_serves(
    subject: engine_contract.Subject,
) -> None:
    """Handed over as ``transformers`` holds them, which SGLang passes over without a word."""
    engine: Any = subject.engine
    pieces = engine._model.pieces
    image = image_of(experts(3), 3)
    fused = tuple(
        piece._replace(name=piece.tensor, offset=0, shape=spec.shape, strides=_strides(spec.shape))
        if "experts" in piece.name
        else piece
        for piece in pieces
        for spec in image.tensors
        if spec.name == piece.tensor
    )
    object.__setattr__(engine._model, "pieces", tuple(dict.fromkeys(fused)))
    await engine.begin_update(image.version, image.tensors)
    for bucket, data in image.buckets(1 << 20):
        await engine.update_bucket(bucket, data)
    with pytest.raises(ValueError, match=r"does not fill wholly: model.layers.0.mlp.experts.w13_weight"):
        await engine.end_update()
    assert engine.state == "invalid"
    await subject.generate(request(1, ids(1, 10), 4, temperature=0.0))
    await engine.checksum()  # answered between iterations: one would have run by now
    assert subject.deltas == []


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
