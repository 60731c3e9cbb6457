"""The torch engine against the contract of all engines."""

from collections.abc import AsyncIterator

import engine_contract
import pytest
import pytest_asyncio
from engine_contract import *  # noqa: F403  the tests themselves
from engine_support import MODEL, VOCABULARY, ids, image, request

from pearl.workers.model import build_model
from pearl.workers.rollout.protocol import Engine, UnsupportedError
from pearl.workers.rollout.torch_engine.engine import TorchEngine
from pearl.workers.rollout.torch_engine.settings import EngineSettings


@pytest_asyncio.fixture
async def subject() -> AsyncIterator[engine_contract.Subject]:
    engine: Engine = TorchEngine(lambda: build_model(MODEL, VOCABULARY, None), EngineSettings())
    await engine.start()
    yield engine_contract.Subject(engine, image)
    await engine.shutdown()


async def test_memory_cannot_be_released(subject: engine_contract.Subject) -> None:
    with pytest.raises(UnsupportedError, match="torch"):
        await subject.engine.release(("weights",))
    with pytest.raises(UnsupportedError, match="torch"):
        await subject.engine.restore(("weights",))


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
    engine = TorchEngine(lambda: build_model(MODEL, VOCABULARY, None), EngineSettings(), counted.append)
    await engine.start()
    other = engine_contract.Subject(engine, image)
    await other.take(1)
    await other.generate(request(1, ids(1, 5), 7))
    await other.finished(1)
    assert sum(counted) == 7
    await engine.shutdown()
