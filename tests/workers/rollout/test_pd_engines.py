"""Attempts over a prefill and a decode engine: what comes out is what one engine alone makes."""

import asyncio
import random

import numpy as np
import pytest
from engine_support import (
    Answer,
    greedy_reference,
    ids,
    ready_core,
    reference,
    reference_logprobs,
    request,
    run,
)
from pd_support import LIMIT_S, Tokens, Worker, abort, send, stage, working

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.pages import Block
from pearl.workers.rollout.protocol import Role, UnsupportedError
from pearl.workers.rollout.torch_engine.settings import EngineSettings

TURNS, ANSWER, OBSERVATION = 3, 20, 7


def longer(context: Tokens, generated: list[int], seed: int) -> Tokens:
    return np.concatenate([context, np.array(generated, np.int32), ids(seed, OBSERVATION)])


def check(context: Tokens, answer: Answer, count: int) -> None:
    assert answer.ids == greedy_reference(reference(1), context, count)
    assert answer.logprobs == pytest.approx(reference_logprobs(reference(1), context, answer.ids), abs=1e-4)


def alone(contexts: list[Tokens], count: int) -> list[list[int]]:
    """Greedy answers of one colocated engine, which other tests hold against transformers."""
    found = run(ready_core(), *[request(i, c, count, temperature=0.0) for i, c in enumerate(contexts)])
    return [found[i].ids for i in range(len(contexts))]


async def turn(prefill: Worker, decode: Worker, attempt: int, context: Tokens) -> Answer:
    await send(prefill, decode, attempt, context, ANSWER)
    return (await decode.ended(attempt))[attempt]


async def offered(decode: Worker, attempt: int) -> None:
    core = await decode.core()
    async with asyncio.timeout(LIMIT_S):
        while attempt not in core._requests or not core._requests[attempt].is_offered:
            await decode.engine.checksum()


@pytest.mark.parametrize("num_pairs", [1, 2])
async def test_pairs_emit_over_several_turns_what_transformers_does(num_pairs: int) -> None:
    prompts = [ids(seed, count) for seed, count in enumerate((1, 2, 17, 130))]
    async with working(*["prefill"] * num_pairs, *["decode"] * num_pairs) as workers:  # type: ignore[arg-type]
        prefills, decodes = workers[:num_pairs], workers[num_pairs:]

        async def episode(number: int, context: Tokens) -> None:
            for step in range(TURNS):
                prefill = prefills[(number + step) % num_pairs]
                decode = decodes[(number + step // 2) % num_pairs]
                answer = await turn(prefill, decode, 10 * number + step, context)
                check(context, answer, ANSWER)
                context = longer(context, answer.ids, 50 + number)

        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                group.create_task(episode(number, prompt))
        for worker in workers:
            assert await worker.is_clean()


async def test_sampled_ids_equal_those_of_a_colocated_engine() -> None:
    async with working("prefill", "decode", "colocated") as (prefill, decode, alone):
        for attempt in range(8):
            context = ids(attempt, 5 + 9 * attempt)
            await send(prefill, decode, attempt, context, 30, temperature=0.8, stop_ids=(3,))
            await alone.engine.generate(
                request(attempt, context, 30, temperature=0.8, stop_ids=(3,)), alone.emit
            )
        found, expected = await decode.ended(*range(8)), await alone.ended(*range(8))
        for attempt in range(8):
            assert (found[attempt].ids, found[attempt].finish) == (
                expected[attempt].ids,
                expected[attempt].finish,
            )
            assert found[attempt].logprobs == pytest.approx(expected[attempt].logprobs, abs=1e-5)
            assert found[attempt].runs == expected[attempt].runs


async def test_prefilled_tokens_are_counted_where_they_are_computed() -> None:
    async with working("prefill", "decode") as (prefill, decode):
        context, counted = ids(1, 37), []
        for attempt in range(TURNS):
            answer = await turn(prefill, decode, attempt, context)
            half_done = (await prefill.ended(attempt))[attempt]
            assert (half_done.ids, half_done.finish, half_done.error) == ([], None, "")
            counted.append((half_done.prefilled, answer.prefilled))
            context = longer(context, answer.ids, 60 + attempt)
        # All but the last token here, that one there; what was generated there is prefilled again here.
        again = ANSWER + OBSERVATION
        assert counted == [(36, 1), (again, 1), (again, 1)]


async def test_only_what_the_decode_side_lacks_is_sent() -> None:
    async with working("prefill", "decode") as (prefill, decode):
        read: list[int] = []
        core = await prefill.core()
        reading = core.kv_read

        def counted(attempt: int, start: int, count: int) -> Block | None:
            read.append(count)
            return reading(attempt, start, count)

        core.kv_read = counted  # type: ignore[method-assign]
        context = ids(1, 100)
        answer = await turn(prefill, decode, 1, context)
        assert sum(read) == 99
        read.clear()
        context = longer(context, answer.ids, 60)
        check(context, await turn(prefill, decode, 2, context), ANSWER)
        # Cached there: whole pages of 16 within context and answer but its last token.
        assert sum(read) == len(context) - 1 - 112


async def test_a_group_is_prefilled_once_and_its_prompt_sent_once() -> None:
    async with working("prefill", "decode") as (prefill, decode):
        prompt = ids(1, 81)
        for member in range(8):
            await send(prefill, decode, member, prompt, 6, temperature=1.0)
        await prefill.ended(*range(8))
        found = await decode.ended(*range(8))
        assert sorted(prefill.found[member].prefilled for member in range(8)) == [0] * 7 + [80]
        assert len({tuple(found[member].ids) for member in range(8)}) > 1


@pytest.mark.scenario("PD-05")
async def test_aborts_and_resumes_in_between_change_nothing_and_leave_nothing() -> None:
    chance = random.Random(5)
    async with working("prefill", "prefill", "decode", "decode") as workers:
        prefills, decodes = workers[:2], workers[2:]

        async def trajectory(number: int) -> None:
            prompt = ids(number, chance.randint(1, 120))
            made: list[int] = []
            for attempt in range(100 * number, 100 * number + 100):
                pair = chance.choice(prefills), chance.choice(decodes)
                context = np.concatenate([prompt, np.array(made, np.int32)])
                await send(*pair, attempt, context, 24 - len(made))
                if attempt % 100 < 5:
                    await asyncio.sleep(chance.random() * 0.02)
                    await abort(attempt, *pair)
                made += (await pair[1].ended(attempt))[attempt].ids
                await pair[0].ended(attempt)
                if len(made) == 24:
                    break
            assert made == alone([prompt], 24)[0]

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(trajectory(number))
        for worker in workers:
            assert await worker.is_clean()


@pytest.mark.scenario("PD-04")
async def test_a_crowded_decode_worker_finishes_all() -> None:
    # Room for about three of eight.
    small = EngineSettings(kv_capacity_tokens=3 * 128)
    async with working("prefill", "decode", settings=[EngineSettings(), small]) as (prefill, decode):
        contexts = [ids(seed, 80) for seed in range(8)]
        for attempt, context in enumerate(contexts):
            await send(prefill, decode, attempt, context, 40)
        found = await decode.ended(*range(8))
        assert [found[attempt].ids for attempt in range(8)] == alone(contexts, 40)
        assert await decode.is_clean()
        assert await prefill.is_clean()


@pytest.mark.scenario("PD-04")
async def test_two_full_workers_on_each_side_do_not_wait_for_each_other() -> None:
    small = EngineSettings(kv_capacity_tokens=2 * 96)
    roles: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
    async with working(*roles, settings=[small] * 4) as workers:
        contexts = [ids(seed, 64) for seed in range(16)]
        for attempt, context in enumerate(contexts):
            await send(workers[attempt % 2], workers[2 + attempt // 2 % 2], attempt, context, 24)
        for attempt, expected in enumerate(alone(contexts, 24)):
            decode = workers[2 + attempt // 2 % 2]
            assert (await decode.ended(attempt))[attempt].ids == expected


@pytest.mark.scenario("PD-03")
async def test_what_the_prefill_side_refuses_the_decode_side_never_answers() -> None:
    small = EngineSettings(kv_capacity_tokens=64)
    async with working("prefill", "decode", settings=[small, EngineSettings()]) as (prefill, decode):
        await send(prefill, decode, 1, ids(1, 100), 8)
        answer = (await decode.ended(1))[1]
        refused = (await prefill.ended(1))[1]
        assert refused.finish == "error"
        assert "never fit into 64 tokens of KV" in refused.error
        assert (answer.ids, answer.finish) == ([], "abort")
        assert "never fit" in answer.error
        assert await decode.is_clean()


@pytest.mark.scenario("PD-10")
async def test_answers_do_not_decay() -> None:
    async with working("prefill", "decode") as (prefill, decode):
        contexts = [ids(seed, 10 + seed % 50) for seed in range(200)]
        for first in range(0, 200, 20):
            some = range(first, first + 20)
            for attempt in some:
                await send(prefill, decode, attempt, contexts[attempt], 8)
            found = await decode.ended(*some)
            assert [found[attempt].ids for attempt in some] == alone(contexts[first : first + 20], 8)
        assert await prefill.is_clean()
        assert await decode.is_clean()


@pytest.mark.parametrize("role", ["colocated", "prefill", "decode"])
async def test_a_request_that_does_not_fit_the_role_goes_elsewhere(role: str) -> None:
    async with working(role) as (worker,):  # type: ignore[arg-type]
        whole = request(1, ids(1, 9), 4)
        await worker.engine.generate(
            stage(whole, "rollout.9.1") if role == "colocated" else whole, worker.emit
        )
        answer = (await worker.ended(1))[1]
        assert (answer.ids, answer.finish) == ([], "abort")
        assert role in answer.error


@pytest.mark.scenario("PD-08")
async def test_roles_change_ten_times_and_outputs_stay() -> None:
    async with working("prefill", "decode") as workers:
        attempts = iter(range(1000))
        for _ in range(10):
            prefill, decode = workers
            used = [next(attempts) for _ in range(6)]
            for attempt in used:
                await send(prefill, decode, attempt, ids(attempt, 50), 12)
            with pytest.raises(ValueError, match="only while idle"):
                await decode.engine.set_role("colocated")
            found = await decode.ended(*used)
            await prefill.ended(*used)
            assert [found[attempt].ids for attempt in used] == alone([ids(a, 50) for a in used], 12)
            await prefill.engine.set_role("decode")
            await decode.engine.set_role("prefill")
            workers.reverse()
        for worker in workers:
            await worker.engine.set_role("colocated")
            assert await worker.is_clean(), "KV from before the switch is still there"
            attempt = next(attempts)
            await worker.engine.generate(request(attempt, ids(7, 50), 12, temperature=0.0), worker.emit)
            answer = (await worker.ended(attempt))[attempt]
            assert answer.prefilled == 50
            check(ids(7, 50), answer, 12)


async def test_an_engine_without_a_transport_stays_colocated() -> None:
    async with working("colocated") as (worker,):
        worker.engine._transport = None
        with pytest.raises(UnsupportedError, match="torch engine"):
            await worker.engine.set_role("decode")


async def test_kv_of_another_version_is_not_taken() -> None:
    async with working("prefill", "decode") as (prefill, decode):
        await prefill.take(2)
        await send(prefill, decode, 1, ids(1, 40), 8)
        answer, sent = (await decode.ended(1))[1], (await prefill.ended(1))[1]
        assert (answer.ids, answer.finish, sent.finish) == ([], "abort", "abort")
        assert "version" in answer.error
        assert "version" in sent.error
        await decode.take(2)
        await send(prefill, decode, 2, ids(1, 40), 8)
        runs = (await decode.ended(2))[2].runs
        assert {(run.version, run.kv_version) for run in runs} == {(Version(0, 2), Version(0, 2))}


async def test_an_interrupting_update_ends_both_halves_and_keeps_tokens() -> None:
    async with working("prefill", "decode") as workers:
        prefill, decode = workers
        prompt = ids(3, 30)
        for attempt in range(4):
            await send(prefill, decode, attempt, prompt, 3000)
        for attempt in range(4):
            await decode.produced(5, attempt)
        for attempt in range(10, 14):
            await send(prefill, decode, attempt, ids(attempt, 400), 50)
        for worker in workers:
            await worker.engine.pause("abort")
            assert worker.engine.is_idle()
            await worker.take(2)
            await worker.engine.continue_generation()
        for attempt in range(4):
            made = decode.found[attempt]
            assert made.finish == "abort"
            assert made.ids == greedy_reference(reference(1), prompt, len(made.ids))
            context = np.concatenate([prompt, np.array(made.ids, np.int32)])
            await send(prefill, decode, 20 + attempt, context, 6)
            resumed = (await decode.ended(20 + attempt))[20 + attempt]
            assert resumed.ids == greedy_reference(reference(2), context, 6)
        for worker in workers:
            assert await worker.is_clean()


async def test_an_update_in_place_ends_what_is_on_its_way_only() -> None:
    async with working("prefill", "decode") as workers:
        prefill, decode = workers
        await send(prefill, decode, 1, ids(1, 40), 300)
        await decode.produced(2, 1)
        await decode.engine.pause("in_place")
        await send(prefill, decode, 2, ids(2, 64), 8)
        await offered(decode, 2)  # and not granted: a paused engine plans nothing
        await prefill.engine.pause("in_place")
        for worker in workers:
            await worker.take(2)
            await worker.engine.continue_generation()
        first, second = (await decode.ended(1, 2))[1], decode.found[2]
        assert (first.finish, len(first.ids)) == ("length", 300)
        assert {run.kv_version for run in first.runs} == {Version(0, 1)}
        assert (second.ids, second.finish) == ([], "abort")
        assert (await prefill.ended(2))[2].finish == "abort"
        for worker in workers:
            assert await worker.is_clean()


async def test_everything_ends_within_the_limit_when_an_engine_shuts_down() -> None:
    async with working("prefill", "decode") as (prefill, decode):
        for attempt in range(4):
            await send(prefill, decode, attempt, ids(attempt, 300), 3000)
        await prefill.ended(*range(4))
        await prefill.engine.shutdown()
        await decode.produced(3, 0)
        async with asyncio.timeout(LIMIT_S):
            await decode.engine.pause("abort")
        assert all(decode.found[attempt].finish == "abort" for attempt in range(4))
