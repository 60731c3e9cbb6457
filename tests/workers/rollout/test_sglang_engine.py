"""The SGLang engine against the contract of all engines, and against the model's own arithmetic."""

from collections.abc import AsyncIterator, Iterator

import engine_contract
import pytest
import pytest_asyncio
import sglang_support
from engine_contract import *  # noqa: F403  the tests themselves
from engine_support import image

from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import SglangSettings

pytestmark = [
    pytest.mark.skipif(bool(sglang_support.why_not()), reason=sglang_support.why_not()),
    pytest.mark.timeout(300),  # the first test starts the server
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Server, SglangSettings]]:
    with sglang_support.running_server() as found:
        yield found


@pytest_asyncio.fixture
async def subject(server: tuple[Server, SglangSettings]) -> AsyncIterator[engine_contract.Subject]:
    async with sglang_support.engine_on(*server) as engine:
        yield engine_contract.Subject(engine, image)
