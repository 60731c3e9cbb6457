"""What every rollout engine must do, whatever it is made of. A test module imports these tests and offers the
``subject`` fixture: a started engine without weights, and images of weights that it can take.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_support import Answer, Image, gather, ids, request

from pearl.types.weights import TensorSpec, Version
from pearl.workers.rollout.protocol import Delta, Engine, GenerateRequest, UnsupportedError

LIMIT_S = 20.0


@dataclass
class Subject:
    engine: Engine
    image: Callable[[int], Image]
    """Version ``Version(0, n)``; different n, different weights."""
    deltas: list[Delta] = field(default_factory=list)
    found: dict[int, Answer] = field(default_factory=dict)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, delta: Delta) -> None:
        self.deltas.append(delta)
        gather(self.found, delta)  # refuses what comes after a finish
        self.told.set()

    async def until(self, condition: Callable[[dict[int, Answer]], bool]) -> dict[int, Answer]:
        async with asyncio.timeout(LIMIT_S):
            while not condition(self.found):
                self.told.clear()
                await self.told.wait()
        return self.found

    async def finished(self, *attempts: int) -> dict[int, Answer]:
        return await self.until(lambda found: all(a in found and found[a].finish for a in attempts))

    async def produced(self, count: int, *attempts: int) -> dict[int, Answer]:
        return await self.until(
            lambda found: all(a in found and len(found[a].ids) >= count for a in attempts)
        )

    async def generate(self, *requests: GenerateRequest) -> None:
        for entry in requests:
            await self.engine.generate(entry, self.emit)

    async def take(self, number: int, bucket_bytes: int = 1 << 16) -> str:
        image = self.image(number)
        await self.engine.begin_update(image.version, image.tensors)
        for bucket, data in image.buckets(bucket_bytes):
            await self.engine.update_bucket(bucket, data)
        return await self.engine.end_update()


def edited(image: Image, name: str, **changes: object) -> tuple[TensorSpec, ...]:
    def edit(spec: TensorSpec) -> TensorSpec:
        fields = {key: getattr(spec, key) for key in spec.__struct_fields__}
        return TensorSpec(**(fields | changes)) if spec.name == name else spec

    return tuple(edit(spec) for spec in image.tensors)


async def test_serves_nothing_before_its_first_weights(subject: Subject) -> None:
    await subject.generate(request(1, ids(1, 9), 4))
    await subject.engine.checksum()  # answered between iterations: one would have run by now
    assert subject.deltas == []
    await subject.take(1)
    found = await subject.finished(1)
    assert (len(found[1].ids), found[1].finish) == (4, "length")
    assert subject.engine.is_idle()


async def test_the_last_delta_and_only_it_has_the_finish_reason(subject: Subject) -> None:
    await subject.take(1)
    await subject.generate(*[request(a, ids(a, 5 + a), 1 + a) for a in range(1, 9)])
    found = await subject.finished(*range(1, 9))
    assert [len(found[a].ids) for a in range(1, 9)] == list(range(2, 10))
    assert sum(stat.prefill_tokens for stat in subject.engine.iteration_stats()) > 0
    assert subject.engine.iteration_stats() == []


@pytest.mark.scenario("PR-04")
async def test_an_attempt_id_is_used_once(subject: Subject) -> None:
    await subject.take(1)
    await subject.generate(request(1, ids(1, 9), 500))
    with pytest.raises(ValueError, match="attempt 1 is already known"):
        await subject.generate(request(1, ids(1, 9), 4))
    await subject.engine.abort(1)
    await subject.finished(1)
    with pytest.raises(ValueError, match="attempt 1 is already known"):
        await subject.generate(request(1, ids(1, 9), 4))


@pytest.mark.scenario("PR-04")
async def test_aborted_and_resubmitted_at_once_500_times(subject: Subject) -> None:
    await subject.take(1)
    context = ids(1, 9)
    for attempt in range(500):
        await subject.generate(request(attempt, context, 400, seed=1))
        await subject.engine.abort(attempt)
    await subject.generate(request(500, context, 3, seed=1))
    await subject.engine.abort(499)  # late: its attempt is over, the next one is not touched
    found = await subject.finished(*range(501))
    assert all(found[attempt].finish == "abort" for attempt in range(500))
    assert (len(found[500].ids), found[500].finish) == (3, "length")


async def test_abort_of_an_unknown_attempt_is_ignored(subject: Subject) -> None:
    await subject.take(1)
    await subject.engine.abort(77)
    assert subject.deltas == []


async def test_pause_with_abort_ends_everything_before_it_returns(subject: Subject) -> None:
    await subject.take(1)
    await subject.generate(*[request(a, ids(a, 9), 600) for a in range(4)])
    await subject.produced(3, 0, 1, 2, 3)
    await subject.engine.pause("abort")
    found = subject.found
    assert all(found[a].finish == "abort" and len(found[a].ids) >= 3 for a in range(4))
    await subject.engine.flush_cache()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_paused_requests_go_on_as_if_nothing_had_been(subject: Subject, mode: str) -> None:
    await subject.take(1)
    context = ids(5, 9)
    await subject.generate(request(0, context, 60, seed=1))
    await subject.finished(0)
    await subject.generate(request(1, context, 60, seed=1))
    await subject.produced(2, 1)
    await subject.engine.pause(mode)  # type: ignore[arg-type]
    count = len(subject.deltas)
    await subject.engine.checksum()
    assert len(subject.deltas) == count
    if mode == "retract":
        await subject.engine.flush_cache()
    await subject.engine.continue_generation()
    found = await subject.finished(1)
    assert found[1].ids == found[0].ids


async def test_flush_is_refused_while_the_cache_is_in_use(subject: Subject) -> None:
    await subject.take(1)
    await subject.generate(request(1, ids(1, 9), 600))
    await subject.produced(1, 1)
    await subject.engine.pause("in_place")
    with pytest.raises(ValueError, match="pause with abort or retract"):
        await subject.engine.flush_cache()


@pytest.mark.scenario("WS-01")
async def test_resuming_in_the_middle_of_an_update_neither_races_nor_hangs(subject: Subject) -> None:
    await subject.take(0)
    attempts = range(8)
    await subject.generate(*[request(a, ids(a, 12), 200) for a in attempts])
    await subject.produced(1, *attempts)
    for number in range(1, 51):
        image = subject.image(number % 3)
        version = Version(0, number)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            await subject.engine.pause("in_place")
            await subject.engine.begin_update(version, image.tensors)
            group.create_task(subject.engine.continue_generation())
            for bucket, data in image.buckets(1 << 17):
                await subject.engine.update_bucket(bucket, data)
            assert await subject.engine.end_update() == image.checksum
    await subject.engine.continue_generation()
    found = await subject.finished(*attempts)
    for attempt in attempts:
        assert (found[attempt].finish, len(found[attempt].ids)) == ("length", 200)
        versions = [run.version for run in found[attempt].runs]
        assert versions == sorted(versions)
    await subject.generate(request(8, ids(8, 12), 4))
    found = await subject.finished(8)
    assert {run.version for run in found[8].runs} == {Version(0, 50)}


@pytest.mark.scenario("WS-05")
async def test_refused_weights_stop_the_engine_until_a_whole_good_update(subject: Subject) -> None:
    await subject.take(1)
    image = subject.image(2)
    name = image.tensors[3].name
    bad = edited(image, name, shape=(3, 5))
    with pytest.raises(ValueError, match=name):
        await subject.engine.begin_update(image.version, bad)
    await subject.generate(request(1, ids(1, 9), 4))
    with pytest.raises(ValueError, match="update"):
        await subject.engine.end_update()
    await subject.engine.continue_generation()
    await subject.engine.checksum()
    assert subject.deltas == []
    assert await subject.take(2) == image.checksum
    found = await subject.finished(1)
    assert {run.version for run in found[1].runs} == {image.version}


@pytest.mark.scenario("WS-05")
async def test_missing_tensors_and_missing_bytes_are_named(subject: Subject) -> None:
    image = subject.image(1)
    missing = image.tensors[2].name
    with pytest.raises(ValueError, match=missing):
        await subject.engine.begin_update(image.version, image.tensors[:2] + image.tensors[3:])
    await subject.engine.begin_update(image.version, image.tensors)
    buckets = image.buckets(4096)
    for index, (bucket, data) in enumerate(buckets):
        if index != len(buckets) // 2:
            await subject.engine.update_bucket(bucket, data)
    lost = buckets[len(buckets) // 2][0]
    names = [
        spec.name
        for spec in image.tensors
        if spec.offset < lost.offset + lost.num_bytes and spec.offset + spec.num_bytes > lost.offset
    ]
    with pytest.raises(ValueError, match=names[0]):
        await subject.engine.end_update()


@pytest.mark.scenario("WS-07")
async def test_no_kv_of_old_weights_meets_a_request_under_the_new_ones(subject: Subject) -> None:
    await subject.take(1)
    prompt = ids(9, 70)
    await subject.generate(request(1, prompt, 8, seed=3))
    await subject.generate(*[request(a, ids(a, 20), 900) for a in (2, 3, 4)])
    await subject.finished(1)
    await subject.produced(1, 2, 3, 4)
    await subject.engine.pause("in_place")
    await subject.take(2)
    await subject.engine.continue_generation()
    await subject.generate(request(5, prompt, 8, seed=3))
    warm = (await subject.finished(5))[5]
    assert warm.prefilled == 70
    assert {(run.version, run.kv_version) for run in warm.runs} == {(Version(0, 2), Version(0, 2))}
    held = (await subject.until(lambda f: all(f[a].runs[-1].version == Version(0, 2) for a in (2, 3, 4))))[2]
    assert held.runs[-1].kv_version == Version(0, 1)
    await subject.engine.pause("abort")
    await subject.engine.flush_cache()
    await subject.engine.continue_generation()
    await subject.generate(request(6, prompt, 8, seed=3))
    cold = (await subject.finished(6))[6]
    assert warm.ids == cold.ids
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-5)


@pytest.mark.scenario("WS-12")
async def test_the_size_of_buckets_changes_nothing(subject: Subject) -> None:
    image = subject.image(1)
    seen = []
    for attempt, size in enumerate((64, 4096, len(image.data))):
        checksum = await subject.take(1, size)
        await subject.generate(request(attempt, ids(1, 9), 20, temperature=0.0))
        seen.append((checksum, tuple((await subject.finished(attempt))[attempt].ids)))
    assert len(set(seen)) == 1
    assert seen[0][0] == image.checksum == await subject.engine.checksum()


async def test_the_load_counts_what_runs_and_waits(subject: Subject) -> None:
    await subject.take(1)
    assert subject.engine.load().num_running == subject.engine.load().kv_used_tokens == 0
    await subject.generate(*[request(a, ids(a, 20), 600) for a in range(3)])
    await subject.produced(1, 0, 1, 2)
    load = subject.engine.load()
    assert load.num_running + load.num_waiting == 3
    assert 60 <= load.kv_used_tokens <= load.kv_capacity_tokens


async def test_what_an_engine_cannot_do_is_a_typed_error(subject: Subject) -> None:
    await subject.engine.set_role(subject.engine.role)
    for role in ("prefill", "decode"):
        with pytest.raises(UnsupportedError, match=subject.engine.name):
            await subject.engine.set_role(role)


async def test_a_packed_context_is_not_changed(subject: Subject) -> None:
    await subject.take(1)
    context = np.frombuffer(ids(1, 9).tobytes(), np.int32)  # read-only, as it comes off the wire
    await subject.generate(GenerateRequest(1, context, request(1, [1], 3).params, 1))
    assert (await subject.finished(1))[1].finish == "length"
