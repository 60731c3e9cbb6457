"""SGLang's endpoints where it says no at first: asked again within the limit, and never for longer."""

import asyncio
from typing import Any, cast

import pytest

from pearl.workers.rollout.sglang.api import SglangApi
from pearl.workers.rollout.sglang.client import Answer, Client, ServerError

PENDING = Answer(400, {"error": {"message": "Flush cache failed: requests pending"}})
GOOD = Answer(200, "Cache flushed.")


class Answering:
    """Gives these answers in turn, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.paths: list[str] = []

    async def call(self, method: str, path: str, body: Any = None, *, limit_s: float) -> Answer:
        self.paths.append(path)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def flush(client: Answering, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(20):
        await SglangApi(cast(Client, client)).flush(limit_s)


async def test_a_flush_that_finds_requests_pending_is_asked_again() -> None:
    client = Answering(PENDING, PENDING, GOOD)
    await flush(client)
    assert len(client.paths) == 3
    assert client.paths[0] == "/flush_cache?timeout=10"


async def test_a_flush_is_given_up_at_its_limit_with_what_was_said() -> None:
    client = Answering(PENDING)
    with pytest.raises(ServerError, match=r"HTTP 400 after 0\.\d s: Flush cache failed: requests pending"):
        await flush(client, limit_s=0.2)
    assert len(client.paths) > 2


@pytest.mark.parametrize("status", [404, 500])
async def test_what_time_does_not_mend_is_asked_once(status: int) -> None:
    client = Answering(Answer(status, "no"))
    with pytest.raises(ServerError, match=f"HTTP {status} after"):
        await flush(client)
    assert len(client.paths) == 1
