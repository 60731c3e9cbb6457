"""Prefill and decode stages on two SGLang servers, and their roles."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import pytest
import pytest_asyncio
import sglang_support
from engine_support import (
    Answer,
    gather,
    greedy_reference,
    ids,
    image,
    reference,
    reference_logprobs,
    request,
)

from pearl.workers.rollout.protocol import Delta, Role
from pearl.workers.rollout.sglang.engine import SglangEngine
from pearl.workers.rollout.sglang.health import EngineDiedError
from pearl.workers.rollout.sglang.pair_rendezvous import PairRendezvous
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import SglangSettings

pytestmark = [
    pytest.mark.skipif(bool(sglang_support.why_no_pairs()), reason=sglang_support.why_no_pairs()),
    pytest.mark.timeout(500),  # the first test starts the servers
]
LIMIT_S = 30.0
RequestManager = tuple[Server, SglangSettings]


@dataclass
class Worker:
    engine: SglangEngine
    point: PairRendezvous
    found: dict[int, Answer] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, delta: Delta) -> None:
        assert delta.attempt not in self.over, f"attempt {delta.attempt} goes on after its end"
        gather(self.found, delta)
        if delta.is_last:
            self.over.add(delta.attempt)
        self.told.set()

    async def ended(self, *attempts: int) -> None:
        await self.until(lambda: self.over.issuperset(attempts))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.told.clear()
                await self.told.wait()

    async def take(self, number: int) -> None:
        version = image(number)
        await self.engine.begin_update(version.version, version.tensors)
        for bucket, data in version.buckets(1 << 20):
            await self.engine.update_bucket(bucket, data)
        assert await self.engine.end_update() == version.checksum


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RequestManager, RequestManager]]:
    with sglang_support.running_servers("prefill", "decode") as (first, second):
        yield first, second


@pytest_asyncio.fixture
async def workers(servers: tuple[RequestManager, RequestManager]) -> AsyncIterator[list[Worker]]:
    """A prefill and a decode worker with version 1; roles may be changed, and are put back."""
    roles: tuple[Role, Role] = ("prefill", "decode")
    async with AsyncExitStack() as stack:
        found = []
        for index, ((server, settings), role) in enumerate(zip(servers, roles, strict=True)):
            point = PairRendezvous("127.0.0.1", "127.0.0.1", f"rollout.{index}.1")
            engine = await stack.enter_async_context(sglang_support.engine_on(server, settings, role, point))
            found.append(Worker(engine, point))
            await found[-1].take(1)
        yield found
        for worker, role in zip(found, roles, strict=True):
            await worker.engine.pause("abort")
            await worker.engine.continue_generation()
            await worker.engine.set_role(role)


async def send(prefill: Worker, decode: Worker, attempt: int, count: int = 20, length: int = 40) -> None:
    whole = request(attempt, ids(attempt, length), count, temperature=0.0)
    await decode.engine.generate(msgspec.structs.replace(whole, pair=prefill.point.name), decode.emit)
    stage = msgspec.structs.replace(whole, pair=str(decode.point.address))
    await prefill.engine.generate(stage, prefill.emit)


async def check(prefill: Worker, decode: Worker, *attempts: int) -> None:
    """Ids and log-probs of whole answers are the model's."""
    for attempt in attempts:
        await send(prefill, decode, attempt)
    await decode.ended(*attempts)
    await prefill.ended(*attempts)
    for attempt in attempts:
        answer, prompt = decode.found[attempt], ids(attempt, 40)
        assert (answer.finish, answer.error) == ("length", "")
        assert answer.ids == greedy_reference(reference(1), prompt, 20)
        assert answer.logprobs == pytest.approx(
            reference_logprobs(reference(1), prompt, answer.ids), abs=1e-4
        )
        stage = prefill.found[attempt]
        assert (stage.ids, stage.finish, stage.prefilled) == ([], None, 40)


async def test_a_pair_answers_as_the_model_does(workers: list[Worker]) -> None:
    prefill, decode = workers
    await check(prefill, decode, 1, 2, 3, 4)
    assert all(worker.engine.is_idle() for worker in workers)


async def test_twelve_role_flips_with_requests_before_and_after_each(workers: list[Worker]) -> None:
    prefill, decode = workers
    await check(prefill, decode, 10)
    for flip in range(1, 7):
        await prefill.engine.set_role("decode")
        await decode.engine.set_role("prefill")
        prefill, decode = decode, prefill
        await check(prefill, decode, 10 + 2 * flip, 11 + 2 * flip)


async def test_an_abort_of_the_decode_half_ends_both_with_what_there_is(workers: list[Worker]) -> None:
    prefill, decode = workers
    await send(prefill, decode, 40, count=1500)
    await decode.until(lambda: 40 in decode.found and len(decode.found[40].ids) >= 10)
    await decode.engine.abort(40)
    answer = decode.found[40]
    assert answer.finish == "abort"
    assert answer.ids == greedy_reference(reference(1), ids(40, 40), len(answer.ids))
    await prefill.ended(40)
    await check(prefill, decode, 41)


async def test_a_half_without_its_other_half_ends(workers: list[Worker]) -> None:
    prefill, decode = workers
    alone = msgspec.structs.replace(request(50, ids(1, 9), 4), pair=str(decode.point.address))
    await prefill.engine.generate(alone, prefill.emit)
    await prefill.engine.abort(50)
    assert prefill.found[50].finish == "abort"
    await decode.engine.generate(
        msgspec.structs.replace(request(51, ids(1, 9), 4), pair="rollout.0.1"), decode.emit
    )
    await decode.engine.abort(51)
    assert decode.found[51].finish == "abort"
    await check(prefill, decode, 52)


async def test_kv_of_other_weights_is_not_taken(workers: list[Worker]) -> None:
    prefill, decode = workers
    await decode.take(2)
    await send(prefill, decode, 60)
    await decode.ended(60)
    await prefill.ended(60)
    assert "version 0:1 was offered to version 0:2" in decode.found[60].error
    assert prefill.found[60].finish == "abort"
    await decode.take(1)
    await check(prefill, decode, 61)


async def test_requests_that_do_not_fit_the_role_end(workers: list[Worker]) -> None:
    prefill, _ = workers
    await prefill.engine.generate(request(70, ids(1, 9), 4), prefill.emit)
    assert prefill.found[70].finish == "abort"


async def test_memory_is_released_and_comes_back_in_both_roles(workers: list[Worker]) -> None:
    for worker in workers:
        await worker.engine.pause("abort")
        await worker.engine.release(("weights", "kv_cache", "cuda_graph"))
        await worker.engine.restore(("weights", "kv_cache", "cuda_graph"))
        await worker.take(1)
        await worker.engine.continue_generation()
    prefill, decode = workers
    await check(prefill, decode, 80, 81)


@pytest.mark.scenario("WS-10")
async def test_a_half_that_is_killed_ends_the_other_half_with_what_it_has(
    servers: tuple[RequestManager, RequestManager],
) -> None:
    """The last test of these servers: kill -9 of the prefill stage amid requests; the decode stage lives on."""
    with pytest.raises(ExceptionGroup) as failure:
        await _kill_prefill(servers)
    assert failure.value.subgroup(EngineDiedError) is not None


async def _kill_prefill(servers: tuple[RequestManager, RequestManager]) -> None:
    (first, first_settings), (second, second_settings) = servers
    points = [PairRendezvous("127.0.0.1", "127.0.0.1", f"rollout.{index}.1") for index in (0, 1)]
    async with (
        sglang_support.engine_on(second, second_settings, "decode", points[1]) as decoder,
        sglang_support.engine_on(first, first_settings, "prefill", points[0]) as prefiller,
    ):
        prefill, decode = Worker(prefiller, points[0]), Worker(decoder, points[1])
        for worker in (prefill, decode):
            await worker.take(1)
        await send(prefill, decode, 90, count=1500)
        await decode.until(lambda: 90 in decode.found and len(decode.found[90].ids) >= 5)
        attempts = range(91, 99)
        for attempt in attempts:
            await send(prefill, decode, attempt, length=1500)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        await prefill.ended(90, *attempts)
        await decode.ended(*attempts)
        for attempt in attempts:
            answer = decode.found[attempt]
            assert answer.finish in ("abort", "length")
            assert answer.ids == greedy_reference(reference(1), ids(attempt, 1500), len(answer.ids))
        await decode.ended(90)  # its KV had arrived
        assert decode.found[90].finish == "length"
        await decode.engine.pause("abort")
        await decode.engine.flush_cache()  # only an idle SGLang does that
        await asyncio.sleep(LIMIT_S)  # the dead engine's own task ends this
