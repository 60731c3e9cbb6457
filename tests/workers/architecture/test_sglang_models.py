"""Architectures in SGLang on CPUs: greedy ids and log-probs are those of transformers, before and after an update."""

import asyncio
import json
from pathlib import Path
from typing import Any

import engine_contract
import pytest
import sglang_support
import torch
from engine_support import greedy_reference, ids, reference_logprobs, request
from test_sglang_experts import image_of
from tiny_models import CONFIGS, PADDING, VOCABULARY, make_model

from pearl.types.config import ModelConfig
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import SglangSettings
from pearl.workers.weight_transfer.checksum import model_checksum

RECORD = json.loads((Path(__file__).parent / "sglang_outcomes.json").read_text("utf-8"))
ROWS = VOCABULARY + PADDING


async def compare(found: tuple[Server, SglangSettings], config: ModelConfig, model: Any) -> None:
    """Compare two versions of the weights, each proven by its checksum."""

    def version(seed: int) -> Any:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return image_of(model, seed)

    async with sglang_support.engine_on(*found, model=config, vocabulary_size=ROWS) as engine:
        subject = engine_contract.Subject(engine, version)
        for seed in (1, 2):
            await subject.take(seed)
            assert await engine.checksum() == model_checksum(model)
            prompts = {
                10 * seed + index: ids(10 * seed + index, length) for index, length in enumerate((3, 40))
            }
            await subject.generate(
                *[request(a, prompt, 12, temperature=0.0) for a, prompt in prompts.items()]
            )
            results = await subject.finished(*prompts)
            for attempt, prompt in prompts.items():
                assert results[attempt].ids == greedy_reference(model, prompt, 12)
                expected = reference_logprobs(model, prompt, results[attempt].ids)
                assert results[attempt].logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(sglang_support.why_not()), reason=sglang_support.why_not())
@pytest.mark.parametrize("name", RECORD["right"])
def test_what_is_recorded_as_right_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    model: Any = make_model(CONFIGS[name](), tmp_path).train(False)
    model.set_attn_implementation("eager")
    config = ModelConfig(path=str(tmp_path))
    with sglang_support.running_servers(
        "colocated", model=config, vocabulary_size=ROWS, max_context_tokens=96
    ) as (found,):
        asyncio.run(compare(found, config, model))


def test_the_record_names_configurations() -> None:
    assert set(RECORD["right"]) <= set(CONFIGS)
