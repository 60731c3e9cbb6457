"""Prefill and decode stages between emulated engines of one process, over the real transport of KV."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from pearl.runtime.clock import MonotonicClock
from pearl.types import emulated_tokens
from pearl.types.config import EmulatedConfig
from pearl.types.messages.rollout import SamplingParams
from pearl.types.weights import BucketSpec, Version
from pearl.workers.emulated_model import NUM_BYTES, TENSORS, image_of
from pearl.workers.rollout.emulated.engine import EmulatedEngine
from pearl.workers.rollout.emulated.settings import EmulatedSettings
from pearl.workers.rollout.kv_transfer.limits import KvLimits
from pearl.workers.rollout.kv_transfer.transport import KvTransport
from pearl.workers.rollout.protocol import Delta, GenerateRequest, Role, UnsupportedError

LIMIT_S = 20.0
KV_BYTES = 1000.0
QUICK: dict[str, Any] = {
    "decode_fixed_seconds": 3e-4,
    "decode_seconds_per_seq": 1e-5,
    "prefill_seconds_per_token": 1e-6,
    "start_seconds": 0.0,
    "update_seconds": 0.0,
    "kv_bytes_per_token": KV_BYTES,
    "kv_bandwidth_bytes_per_s": 1e12,
}


class Worker:
    def __init__(self, index: int, role: Role, timing: dict[str, Any], limits: KvLimits | None) -> None:
        self.name = f"rollout.{index}.1"
        self.transport = KvTransport("127.0.0.1", "127.0.0.1", self.name, limits)
        settings = EmulatedSettings(
            emulated_tokens.VOCABULARY_SIZE, EmulatedConfig(**(QUICK | timing)), slot=index
        )
        self.engine = EmulatedEngine(settings, MonotonicClock(), transport=self.transport, role=role)
        self.deltas: list[Delta] = []
        self.over: dict[int, Delta] = {}
        self._told = asyncio.Event()

    def emit(self, delta: Delta) -> None:
        assert delta.attempt not in self.over, f"attempt {delta.attempt} goes on after its end"
        self.deltas.append(delta)
        if delta.is_last:
            self.over[delta.attempt] = delta
        self._told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._told.clear()
                await self._told.wait()

    async def ended(self, attempt: int) -> Delta:
        await self.until(lambda: attempt in self.over)
        return self.over[attempt]

    def ids(self, attempt: int) -> list[int]:
        return [token for delta in self.deltas if delta.attempt == attempt for token in delta.ids]

    def prefilled(self, attempt: int) -> int:
        return sum(delta.prefilled_tokens for delta in self.deltas if delta.attempt == attempt)

    async def take(self, step: int) -> None:
        await self.engine.begin_update(Version(0, step), TENSORS)
        data = memoryview(image_of(Version(0, step)))
        await self.engine.update_bucket(BucketSpec(0, NUM_BYTES, ""), data)
        await self.engine.end_update()

    async def is_clean(self) -> bool:
        async with asyncio.timeout(LIMIT_S):
            while self.transport.num_conversations:  # noqa: ASYNC110 - of another thread's loop
                await asyncio.sleep(0.001)
        load = self.engine.load()
        await self.engine.flush_cache()
        left = self.engine.load().kv_used_tokens + self.transport.staged_bytes
        return load.num_running + load.num_waiting + left == 0 and self.engine.is_idle()


@asynccontextmanager
async def working(*roles: Role, limits: KvLimits | None = None, **timing: Any) -> AsyncIterator[list[Worker]]:
    workers = [Worker(index, role, timing, limits) for index, role in enumerate(roles)]
    try:
        for worker in workers:
            await worker.engine.start()
            await worker.take(1)
        yield workers
    finally:
        for worker in workers:
            await worker.engine.shutdown()


def request(attempt: int, ids: list[int], seed: int, limit: int = 200) -> GenerateRequest:
    params = SamplingParams(limit, 1.0, (emulated_tokens.STOP_ID,))
    return GenerateRequest(attempt, np.array(ids, np.int32), params, seed)


def prompt(seed: int, num_tokens: int, asked: int) -> list[int]:
    content = np.random.default_rng(seed).integers(2, emulated_tokens.LENGTH_BASE, num_tokens - 1)
    return [*content.tolist(), emulated_tokens.length_id(asked)]


async def send(prefill: Worker, decode: Worker, whole: GenerateRequest) -> None:
    await decode.engine.generate(msgspec.structs.replace(whole, pair=prefill.name), decode.emit)
    await prefill.engine.generate(
        msgspec.structs.replace(whole, pair=str(decode.transport.address)), prefill.emit
    )


async def test_a_pair_says_what_one_worker_says_turn_after_turn() -> None:
    async with working("colocated", "prefill", "decode") as (whole, prefill, decode):
        for trajectory in range(4):
            context = prompt(trajectory, 700, 30)
            known = 0  # to the prefill worker
            for turn in range(3):
                attempt = 10 * trajectory + turn
                entry = request(attempt, context, trajectory)
                await whole.engine.generate(entry, whole.emit)
                await send(prefill, decode, entry)
                assert (await whole.ended(attempt)).finish == (await decode.ended(attempt)).finish == "stop"
                assert (await prefill.ended(attempt)).handed_over
                assert decode.ids(attempt) == whole.ids(attempt)
                assert (prefill.ids(attempt), prefill.prefilled(attempt)) == ([], len(context) - 1 - known)
                assert decode.prefilled(attempt) == 1
                known = len(context) - 1
                context = [*context, *decode.ids(attempt), *prompt(100 + attempt, 50, 30)]
        assert await prefill.is_clean()
        assert await decode.is_clean()


async def test_what_is_handed_over_takes_its_time_on_the_link() -> None:
    async with working("prefill", "decode", kv_bandwidth_bytes_per_s=2e6) as (prefill, decode):
        loop = asyncio.get_running_loop()
        began = loop.time()
        for attempt in range(3):
            await send(prefill, decode, request(attempt, prompt(attempt, 401, 5), attempt))
        for attempt in range(3):
            await decode.ended(attempt)
        assert loop.time() - began >= 3 * 400 * KV_BYTES / 2e6, "all of one worker share its link"


async def test_many_pairs_at_once() -> None:
    async with working("prefill", "decode", "prefill", "decode") as workers:
        for attempt in range(60):
            prefill, decode = workers[attempt % 2 * 2], workers[attempt // 2 % 2 * 2 + 1]
            await send(prefill, decode, request(attempt, prompt(attempt, 300, 20), attempt))
        for attempt in range(60):
            assert (await workers[attempt // 2 % 2 * 2 + 1].ended(attempt)).finish == "stop"
        assert all([await worker.is_clean() for worker in workers])


@pytest.mark.parametrize("aborted", ["prefill", "decode"])
async def test_an_abort_in_the_middle_of_a_handing_over_frees_both_halves(aborted: str) -> None:
    async with working("prefill", "decode", kv_bandwidth_bytes_per_s=1e6) as (prefill, decode):
        await send(prefill, decode, request(1, prompt(1, 1001, 20), 1))
        async with asyncio.timeout(LIMIT_S):
            while not decode.engine.load().num_running:  # noqa: ASYNC110 - its room is granted on the way
                await asyncio.sleep(0.001)
        await (prefill if aborted == "prefill" else decode).engine.abort(1)
        assert (await prefill.ended(1)).finish == "abort"
        assert (await decode.ended(1)).finish == "abort"
        assert await prefill.is_clean()
        assert await decode.is_clean()
        await send(prefill, decode, request(2, prompt(2, 10, 20), 2))
        assert (await decode.ended(2)).finish == "stop"


async def test_a_decode_worker_that_is_gone_ends_the_prefill_half_in_time() -> None:
    limits = KvLimits(connect_s=0.2, contact_s=0.2, silence_s=0.3, ping_s=0.05)
    async with working("prefill", "decode", limits=limits) as (prefill, decode):
        await decode.engine.shutdown()
        entry = request(1, prompt(1, 100, 20), 1)
        pair = str(decode.transport.address)
        await prefill.engine.generate(msgspec.structs.replace(entry, pair=pair), prefill.emit)
        assert (await prefill.ended(1)).finish == "abort"
        assert await prefill.is_clean()


async def test_a_prefill_half_that_never_comes_ends_the_decode_half_in_time() -> None:
    limits = KvLimits(contact_s=0.1)
    async with working("decode", limits=limits) as (decode,):
        entry = request(1, prompt(1, 100, 20), 1)
        await decode.engine.generate(msgspec.structs.replace(entry, pair="rollout.7.1"), decode.emit)
        assert (await decode.ended(1)).finish == "abort"
        assert "rollout.7.1" in decode.over[1].error
        assert await decode.is_clean()


async def test_kv_of_other_weights_is_not_taken() -> None:
    async with working("prefill", "decode") as (prefill, decode):
        await decode.take(2)
        await send(prefill, decode, request(1, prompt(1, 100, 20), 1))
        assert (await decode.ended(1)).finish == "abort"
        assert "version" in decode.over[1].error
        assert (await prefill.ended(1)).finish == "abort"


async def test_requests_that_do_not_fit_the_role_end_as_abort() -> None:
    async with working("colocated", "decode") as (whole, decode):
        await whole.engine.generate(
            msgspec.structs.replace(request(1, [5], 1), pair="rollout.9.1"), whole.emit
        )
        await decode.engine.generate(request(2, [5], 1), decode.emit)
        assert (whole.over[1].finish, decode.over[2].finish) == ("abort", "abort")


async def test_a_role_changes_only_while_idle_and_forgets_what_was_kept() -> None:
    async with working("colocated") as (worker,):
        await worker.engine.generate(request(1, prompt(1, 50, 150), 1), worker.emit)
        with pytest.raises(ValueError, match="only while idle"):
            await worker.engine.set_role("decode")
        await worker.ended(1)
        await worker.engine.set_role("prefill")
        assert worker.engine.role == "prefill"
        assert worker.engine.load().kv_used_tokens == 0
        await worker.engine.set_role("colocated")
        await worker.engine.generate(request(2, prompt(1, 50, 10), 1), worker.emit)
        assert (await worker.ended(2)).finish == "stop"
        assert worker.prefilled(2) == 50
    settings = EmulatedSettings(emulated_tokens.VOCABULARY_SIZE)
    with pytest.raises(UnsupportedError, match="emulated"):
        EmulatedEngine(settings, MonotonicClock(), role="decode")
