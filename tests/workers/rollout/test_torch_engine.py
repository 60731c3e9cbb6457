"""The torch engine against the contract of all engines."""

from collections.abc import AsyncIterator

import engine_contract
import pytest
import pytest_asyncio
from engine_contract import *  # noqa: F403  the tests themselves
from engine_support import MODEL, VOCABULARY, ids, image, request

from pearl.workers.model import build_empty
from pearl.workers.rollout.protocol import Engine, MemoryTag
from pearl.workers.rollout.torch_engine.engine import TorchEngine
from pearl.workers.rollout.torch_engine.settings import EngineSettings


@pytest_asyncio.fixture
async def subject() -> AsyncIterator[engine_contract.Subject]:
    engine: Engine = TorchEngine(lambda: build_empty(MODEL, VOCABULARY), EngineSettings())
    await engine.start()
    yield engine_contract.Subject(engine, image)
    await engine.shutdown()


TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")


async def test_output_after_a_release_is_that_before_it_under_the_same_weights(
    subject: engine_contract.Subject,
) -> None:
    await subject.take(1)
    prompt = ids(9, 70)
    await subject.generate(request(1, prompt, 12, seed=3))
    before = (await subject.finished(1))[1]
    checksum = await subject.engine.checksum()
    for attempt in (2, 3):
        await subject.engine.pause("abort")
        released = await subject.engine.release(TAGS)
        assert released is not None
        assert released.num_bytes > 1 << 18
        await subject.engine.restore(("weights",))
        assert await subject.take(1) == checksum
        await subject.engine.restore(("kv_cache", "cuda_graph"))
        await subject.engine.continue_generation()
        await subject.generate(request(attempt, prompt, 12, seed=3))
        after = (await subject.finished(attempt))[attempt]
        assert (after.ids, after.logprobs) == (before.ids, before.logprobs)
        assert after.prefilled == 70, "KV from before the release was used"


@pytest.mark.scenario("MH-03")
async def test_an_engine_without_its_memory_serves_nothing(subject: engine_contract.Subject) -> None:
    await subject.take(1)
    await subject.engine.pause("abort")
    await subject.engine.release(TAGS)
    await subject.engine.continue_generation()
    await subject.generate(request(1, ids(1, 9), 4))
    with pytest.raises(ValueError, match="released"):
        await subject.take(1)
    with pytest.raises(ValueError, match="released"):
        await subject.engine.checksum()
    await subject.engine.restore(("weights",))
    await subject.take(1)
    await subject.engine.checksum()  # between iterations: one would have run by now
    assert subject.deltas == [], "weights are there, memory for KV is not"
    await subject.engine.restore(("kv_cache",))
    assert (await subject.finished(1))[1].finish == "length"


async def test_memory_comes_back_without_weights(subject: engine_contract.Subject) -> None:
    await subject.take(1)
    await subject.engine.pause("abort")
    await subject.engine.release(TAGS)
    await subject.engine.restore(TAGS)
    await subject.engine.continue_generation()
    await subject.generate(request(1, ids(1, 9), 4))
    await subject.engine.checksum()
    assert subject.deltas == []


async def test_a_busy_engine_keeps_its_memory(subject: engine_contract.Subject) -> None:
    await subject.take(1)
    await subject.generate(request(1, ids(1, 9), 300))
    await subject.produced(1, 1)
    with pytest.raises(ValueError, match="only while paused and idle"):
        await subject.engine.release(TAGS)
    await subject.engine.pause("in_place")
    with pytest.raises(ValueError, match="1 requests are there"):
        await subject.engine.release(TAGS)
    await subject.engine.continue_generation()
    assert (await subject.finished(1))[1].finish == "length"


async def test_an_engine_that_never_had_weights_can_let_go(subject: engine_contract.Subject) -> None:
    await subject.engine.pause("abort")
    await subject.engine.release(TAGS)
    await subject.engine.restore(TAGS)
    assert await subject.take(1) == subject.image(1).checksum


async def test_calls_after_shutdown_are_refused(subject: engine_contract.Subject) -> None:
    await subject.take(1)
    await subject.engine.shutdown()
    await subject.engine.shutdown()
    with pytest.raises(ValueError, match="shut down"):
        await subject.engine.checksum()


async def test_a_model_that_cannot_be_built_fails_the_start() -> None:
    def fail() -> None:
        raise ValueError("model.path is wrong")

    engine = TorchEngine(fail, EngineSettings())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model\.path is wrong"):
        await engine.start()
    await engine.shutdown()


async def test_sampled_tokens_are_counted_before_they_are_told(subject: engine_contract.Subject) -> None:
    counted: list[int] = []
    engine = TorchEngine(lambda: build_empty(MODEL, VOCABULARY), EngineSettings(), counted.append)
    await engine.start()
    other = engine_contract.Subject(engine, image)
    await other.take(1)
    await other.generate(request(1, ids(1, 5), 7))
    await other.finished(1)
    assert sum(counted) == 7
    await engine.shutdown()
