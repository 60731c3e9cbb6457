"""The SGLang engine against the contract of all engines, and against the model's own arithmetic."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import engine_contract
import numpy as np
import pytest
import pytest_asyncio
import sglang_support
from engine_contract import *  # noqa: F403  the tests themselves
from engine_support import (
    VOCABULARY,
    generate_one,
    greedy_reference,
    ids,
    image,
    ready_core,
    reference,
    reference_logprobs,
    request,
)

from pearl.runtime.pidfd import wait_exited
from pearl.runtime.process_markers import open_pidfds, with_descendants
from pearl.types.weights import Version
from pearl.workers.rollout.protocol import MemoryTag
from pearl.workers.rollout.sglang.health import EngineDiedError
from pearl.workers.rollout.sglang.memory import held_bytes
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import SglangSettings

pytestmark = [
    pytest.mark.skipif(bool(sglang_support.why_not()), reason=sglang_support.why_not()),
    pytest.mark.timeout(300),  # the first test starts the server
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Server, SglangSettings]]:
    with sglang_support.running_servers("colocated") as (found,):
        yield found


@pytest_asyncio.fixture
async def subject(server: tuple[Server, SglangSettings]) -> AsyncIterator[engine_contract.Subject]:
    async with sglang_support.engine_on(*server) as engine:
        yield engine_contract.Subject(engine, image)


GONE_S = 15.0
TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")


async def test_greedy_ids_and_log_probs_are_those_of_the_model(subject: engine_contract.Subject) -> None:
    for number in (1, 2):
        await subject.take(number)
        prompts = {attempt: ids(attempt, 5 + attempt) for attempt in range(100 * number, 100 * number + 6)}
        await subject.generate(
            *[request(attempt, prompt, 40, temperature=0.0) for attempt, prompt in prompts.items()]
        )
        found = await subject.finished(*prompts)
        for attempt, prompt in prompts.items():
            answer = found[attempt]
            assert answer.ids == greedy_reference(reference(number), prompt, 40)
            expected = reference_logprobs(reference(number), prompt, answer.ids)
            assert answer.logprobs == pytest.approx(expected, abs=1e-4)
            assert {run.version for run in answer.runs} == {Version(0, number)}


async def test_samples_are_those_of_the_torch_engine_wherever_they_go_on(
    subject: engine_contract.Subject,
) -> None:
    await subject.take(1)
    prompt, seed = ids(3, 20), (1 << 63) + 5
    await subject.generate(
        request(1, prompt, 40, temperature=0.7, seed=seed),
        request(2, prompt, 40, temperature=0.0),  # greedy beside sampled, in one batch
    )
    found = await subject.finished(1, 2)
    expected = generate_one(ready_core(1), request(1, prompt, 40, temperature=0.7, seed=seed))
    assert found[1].ids == expected.ids
    assert found[1].logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert found[2].ids == greedy_reference(reference(1), prompt, 40)
    longer = np.concatenate([prompt, np.array(expected.ids[:15], np.int32)])
    await subject.generate(request(3, longer, 25, temperature=0.7, seed=seed))
    assert (await subject.finished(3))[3].ids == expected.ids[15:]


async def test_an_end_token_ends_and_is_part_of_the_answer(subject: engine_contract.Subject) -> None:
    await subject.take(1)
    prompt = ids(1, 20)
    end = greedy_reference(reference(1), prompt, 12)[5]
    await subject.generate(request(1, prompt, 12, temperature=0.0, stop_ids=(end,)))
    answer = (await subject.finished(1))[1]
    assert (answer.ids[-1], answer.finish) == (end, "stop")
    assert end not in answer.ids[:-1]


async def test_what_sglang_would_choke_on_never_reaches_it(subject: engine_contract.Subject) -> None:
    await subject.take(1)
    await subject.generate(
        request(1, [], 4),
        request(2, [1, VOCABULARY], 4),
        request(3, [1, 2], 1 << 20),
        request(4, [1, 2], 0),
    )
    found = await subject.finished(1, 2, 3, 4)
    assert [found[a].finish for a in (1, 2, 3, 4)] == ["error", "error", "error", "length"]
    assert "vocabulary of 32" in found[2].error


async def test_an_aborted_attempt_has_all_that_it_made(subject: engine_contract.Subject) -> None:
    await subject.take(1)
    prompt = ids(1, 20)
    await subject.generate(request(1, prompt, 1000, temperature=0.0))
    await subject.produced(20, 1)
    await subject.engine.abort(1)
    answer = subject.found[1]
    assert answer.finish == "abort"
    assert answer.ids == greedy_reference(reference(1), prompt, len(answer.ids))
    assert len(answer.logprobs) == len(answer.ids)


async def test_output_after_a_release_is_that_before_it(
    subject: engine_contract.Subject, server: tuple[Server, SglangSettings]
) -> None:
    await subject.take(1)
    prompt = ids(9, 1800)  # pages of the pool are there only once they were used
    await subject.generate(
        *[request(a, ids(a, 1800), 4) for a in range(10, 18)], request(1, prompt, 12, seed=3)
    )
    before = (await subject.finished(1, *range(10, 18)))[1]
    assert server[0].pid is not None
    for attempt in (2, 3):
        await subject.engine.pause("abort")
        held = held_bytes(server[0].pid, uses_gpu=False)
        released = await subject.engine.release(TAGS)
        assert released is not None
        assert held - held_bytes(server[0].pid, uses_gpu=False) > 1 << 20
        with pytest.raises(ValueError, match="released"):
            await subject.engine.checksum()
        await subject.engine.restore(("weights",))
        assert await subject.take(1) == subject.image(1).checksum
        await subject.engine.restore(("kv_cache", "cuda_graph"))
        await subject.engine.continue_generation()
        await subject.generate(request(attempt, prompt, 12, seed=3))
        after = (await subject.finished(attempt))[attempt]
        assert after.ids == before.ids
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
        assert after.prefilled == len(prompt), "KV from before the release was used"


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


async def test_an_attempt_aborted_in_a_pause_is_over_at_once_and_leaves_nothing(
    subject: engine_contract.Subject,
) -> None:
    await subject.take(1)
    await subject.generate(request(1, ids(1, 9), 900), request(2, ids(2, 9), 60, temperature=0.0))
    await subject.produced(3, 1, 2)
    await subject.engine.pause("in_place")
    await subject.engine.abort(1)
    assert subject.found[1].finish == "abort"
    await subject.engine.continue_generation()
    found = await subject.finished(2)
    assert found[2].ids == greedy_reference(reference(1), ids(2, 9), 60)
    await subject.engine.pause("abort")
    await subject.engine.flush_cache()


async def test_its_death_ends_what_runs_and_leaves_nothing(server: tuple[Server, SglangSettings]) -> None:
    """The last test of this server: kill -9, with an answer on its way."""
    running, settings = server
    assert running.pid is not None
    pids = with_descendants([running.pid])
    shared = {path for pid in pids for path in sglang_support.shared_memory(pid)}
    with open_pidfds(pids) as fds:
        assert len(fds) >= 3, "server, scheduler and detokenizer"
        with pytest.raises(ExceptionGroup) as failure:
            await _kill(running, settings)
        assert failure.value.subgroup(EngineDiedError) is not None
        assert await wait_exited(fds, GONE_S)
    await running.stop()
    assert sglang_support.existing({*shared, str(settings.log_path.with_name("sglang-files"))}) == []


async def _kill(running: Server, settings: SglangSettings) -> None:
    assert running.pid is not None
    async with sglang_support.engine_on(running, settings) as engine:
        subject = engine_contract.Subject(engine, image)
        await subject.take(1)
        await subject.generate(request(1, ids(1, 20), 1500, temperature=0.0))
        await subject.produced(2, 1)
        os.kill(running.pid, signal.SIGKILL)
        answer = (await subject.finished(1))[1]
        assert answer.finish == "abort"
        assert answer.ids == greedy_reference(reference(1), ids(1, 20), len(answer.ids))
        await asyncio.sleep(GONE_S)  # the engine's own task ends this
