"""The emulated engine against the contract of all engines."""

from collections.abc import AsyncIterator

import engine_contract
import pytest_asyncio
from engine_contract import *  # noqa: F403  the tests themselves
from engine_support import VOCABULARY, Image

from pearl.runtime.clock import MonotonicClock
from pearl.types.config import EmulatedConfig
from pearl.types.weights import Version
from pearl.workers.emulated_model import TENSORS, checksum_of, image_of
from pearl.workers.rollout.emulated.engine import EmulatedEngine
from pearl.workers.rollout.emulated.settings import EmulatedSettings
from pearl.workers.rollout.protocol import Engine

QUICK = EmulatedConfig(
    prefill_seconds_per_token=1e-6,
    decode_fixed_seconds=2e-4,
    decode_seconds_per_seq=1e-5,
    start_seconds=0.0,
    update_seconds=0.0,
)


def image(number: int) -> Image:
    data = image_of(Version(0, number))
    return Image(Version(0, number), TENSORS, data, checksum_of(data))


@pytest_asyncio.fixture
async def subject() -> AsyncIterator[engine_contract.Subject]:
    engine: Engine = EmulatedEngine(EmulatedSettings(VOCABULARY, QUICK), MonotonicClock())
    await engine.start()
    yield engine_contract.Subject(engine, image)
    await engine.shutdown()
