"""The emulated engine's time, tokens and KV, on a clock that only the test moves. No torch."""

import asyncio
from typing import Any

import numpy as np
import pytest

from pearl.testing.manual_clock import ManualClock
from pearl.types import emulated_tokens
from pearl.types.config import EmulatedConfig
from pearl.types.messages.rollout import SamplingParams
from pearl.types.weights import Version
from pearl.workers.emulated_model import NUM_BYTES, TENSORS, checksum_of, image_of
from pearl.workers.rollout.emulated.core import EmulatedCore
from pearl.workers.rollout.emulated.engine import MAX_BEHIND_S, NOMINAL_WEIGHT_BYTES, EmulatedEngine
from pearl.workers.rollout.emulated.settings import EmulatedSettings
from pearl.workers.rollout.emulated.weights import IncomingWeights
from pearl.workers.rollout.protocol import Delta, GenerateRequest

A_S, B_S, PREFILL_S = 0.01, 0.001, 0.0001
TIMING: dict[str, Any] = {
    "decode_fixed_seconds": A_S,
    "decode_seconds_per_seq": B_S,
    "prefill_seconds_per_token": PREFILL_S,
    "noise": 0.0,
    "length_spread": 0.0,
    "start_seconds": 0.0,
    "update_seconds": 0.0,
}


def settings(*, timing: dict[str, Any] | None = None, **changes: Any) -> EmulatedSettings:
    return EmulatedSettings(
        emulated_tokens.VOCABULARY_SIZE, EmulatedConfig(**(TIMING | (timing or {}))), **changes
    )


def take(core: EmulatedCore, step: int) -> str:
    version = Version(0, step)
    core.begin_update(version, TENSORS)
    core._incoming = IncomingWeights(version, TENSORS)
    core._incoming._image[:] = image_of(version)
    core._incoming._is_there[:] = b"\1" * NUM_BYTES
    return core.end_update()


def ready(step: int = 1, **changes: Any) -> EmulatedCore:
    core = EmulatedCore(settings(**changes))
    assert take(core, step) == checksum_of(image_of(Version(0, step)))
    return core


def prompt(seed: int, num_tokens: int, asked: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Content, then the wish for a length."""
    content = np.random.default_rng(seed).integers(2, emulated_tokens.LENGTH_BASE, num_tokens - 1)
    return np.append(content, emulated_tokens.length_id(asked)).astype(np.int32)


def request(attempt: int, ids: Any, limit: int = 150, seed: int | None = None) -> GenerateRequest:
    params = SamplingParams(limit, 1.0, (emulated_tokens.STOP_ID,))
    return GenerateRequest(attempt, np.array(ids, np.int32), params, attempt if seed is None else seed)


def run(core: EmulatedCore, *requests: GenerateRequest) -> tuple[dict[int, list[int]], list[float]]:
    """To the end: ids by attempt, and the iterations' seconds."""
    for entry in requests:
        core.submit(entry)
    seconds = []
    while core.has_work():
        took = core.begin()
        assert took is not None
        seconds.append(took)
        core.end()
    core.report()
    found: dict[int, list[int]] = {}
    for delta in core.deltas:
        found.setdefault(delta.attempt, []).extend(delta.ids)
    return found, seconds


def prefilled(core: EmulatedCore, attempt: int) -> int:
    return sum(delta.prefilled_tokens for delta in core.deltas if delta.attempt == attempt)


# time


def test_a_pass_takes_a_fixed_time_and_its_share_for_each_sequence_and_prefilled_token() -> None:
    core = ready(prefill_chunk_tokens=100)
    _, seconds = run(core, request(1, prompt(1, 150, 4)), request(2, prompt(2, 50, 4)))
    # 100 of the first; its other 50 with the second's 50, both give a token; then both decode.
    decode = A_S + 2 * B_S
    assert seconds == pytest.approx([A_S + 100 * PREFILL_S, A_S + 100 * PREFILL_S, decode, decode, decode])
    stats = core.take_stats()
    assert [(stat.num_decoding, stat.prefill_tokens) for stat in stats] == [(0, 100), (0, 100)] + [(2, 0)] * 3
    assert [stat.context_tokens for stat in stats[2:]] == [202, 204, 206]


def test_noise_has_the_mean_of_the_model_and_belongs_to_seed_slot_and_iteration() -> None:
    def timed(**changes: Any) -> list[float]:
        core = ready(timing={"noise": 0.2}, **changes)
        return run(core, request(1, prompt(1, 1, 4000), 4000))[1]

    seconds = timed(seed=5, slot=3)
    assert np.mean(seconds) == pytest.approx(A_S + B_S, rel=0.02)
    assert np.std(np.log(seconds)) == pytest.approx(0.2, rel=0.05)
    assert timed(seed=5, slot=3) == seconds
    assert timed(seed=5, slot=4) != seconds
    assert timed(seed=6, slot=3) != seconds


# tokens


def test_an_answer_is_as_long_as_was_asked_for_and_ends_with_the_stop() -> None:
    core = ready()
    found, _ = run(core, request(1, prompt(1, 10, 7)), request(2, prompt(2, 10, 7), limit=5))
    assert len(found[1]) == 7
    assert found[1][-1] == emulated_tokens.STOP_ID
    assert len(found[2]) == 5
    assert {delta.attempt: delta.finish for delta in core.deltas if delta.finish} == {1: "stop", 2: "length"}
    assert all(
        emulated_tokens.FIRST_CONTENT_ID <= token < emulated_tokens.LENGTH_BASE for token in found[1][:-1]
    )


def test_answers_of_a_group_differ_in_length_around_what_was_asked_for() -> None:
    core = ready(timing={"length_spread": 0.3}, max_running=256, kv_capacity_tokens=10**6)
    found, _ = run(core, *(request(seed, prompt(1, 10, 200), 2000) for seed in range(256)))
    lengths = [len(ids) for ids in found.values()]
    assert np.mean(lengths) == pytest.approx(200, rel=0.1)
    assert np.std(np.log(lengths)) == pytest.approx(0.3, rel=0.15)


@pytest.mark.parametrize("cut", [1, 7, 13])
def test_the_same_trajectory_gets_the_same_tokens_wherever_and_however_often_it_runs(cut: int) -> None:
    context = prompt(1, 30, 40)
    whole, _ = run(ready(timing={"length_spread": 0.3}), request(1, context, seed=77))
    elsewhere = ready(timing={"length_spread": 0.3}, slot=9, seed=4, step=2)
    first, _ = run(elsewhere, request(1, context, limit=cut, seed=77))
    assert first[1] == whole[1][:cut]
    rest, _ = run(ready(timing={"length_spread": 0.3}), request(1, [*context, *first[1]], seed=77))
    assert first[1] + rest[1] == whole[1]


# KV


def test_the_next_turn_computes_only_what_is_new() -> None:
    core = ready()
    context = prompt(1, 100, 20)
    found, _ = run(core, request(1, context, seed=7))
    assert prefilled(core, 1) == 100
    longer = [*context, *found[1], *prompt(2, 30, 5)]
    run(core, request(2, longer, seed=7))
    # The last token of an answer is never computed by the turn that makes it.
    assert prefilled(core, 2) == 31


def test_siblings_wait_for_the_first_to_compute_their_prompt_and_are_spared_it() -> None:
    core = ready(prefill_chunk_tokens=60)
    context = prompt(1, 100, 20)
    siblings = [request(attempt, context, seed=attempt) for attempt in (1, 2, 3)]
    found, seconds = run(core, *siblings, request(4, prompt(2, 100, 20)))
    assert [prefilled(core, attempt) for attempt in (1, 2, 3, 4)] == [100, 1, 1, 100]
    # The stranger does not wait behind them: it takes what the first leaves of the second chunk.
    assert seconds[:2] == pytest.approx([A_S + 60 * PREFILL_S, A_S + 60 * PREFILL_S])
    assert found[1] == run(ready(), request(1, context, seed=1))[0][1]
    run(core, request(5, context, seed=5))
    assert prefilled(core, 5) == 1, "of what the first left behind"
    run(core, request(6, [*context, *found[1]], seed=6))
    assert prefilled(core, 6) == 1, "of as much as they have in common"


def test_what_is_computed_under_old_weights_spares_siblings_nothing() -> None:
    core = ready()
    context = prompt(1, 100, 50)
    core.submit(request(1, context, seed=1))
    core.begin()
    core.end()
    take(core, 2)
    run(core, request(2, context, seed=2))
    assert prefilled(core, 2) == 100


def test_a_prefix_that_is_not_the_same_is_computed_again_from_where_it_differs() -> None:
    core = ready()
    context = prompt(1, 100, 1)
    run(core, request(1, context, seed=7))
    context[60] += 1
    run(core, request(2, context, seed=7))
    assert prefilled(core, 2) == 40


def test_the_least_recently_used_prefix_goes_first() -> None:
    core = ready(kv_capacity_tokens=250)
    contexts = {seed: prompt(seed, 100, 1) for seed in (1, 2, 3)}
    run(core, request(1, contexts[1]))
    run(core, request(2, contexts[2]))
    run(core, request(3, contexts[3]))
    assert core.load().kv_used_tokens <= 250
    run(core, request(13, contexts[3], seed=3), request(12, contexts[2], seed=2))
    assert (prefilled(core, 13), prefilled(core, 12)) == (1, 1)
    run(core, request(11, contexts[1], seed=1))
    assert prefilled(core, 11) == 100


def test_new_weights_forget_all_kept_kv() -> None:
    core = ready()
    context = prompt(1, 100, 1)
    run(core, request(1, context, seed=7))
    take(core, 2)
    run(core, request(2, context, seed=7))
    assert prefilled(core, 2) == 100


def test_requests_are_retracted_and_admitted_again_when_kv_runs_out() -> None:
    core = ready(kv_capacity_tokens=300)
    requests = [request(attempt, prompt(attempt, 60, 100)) for attempt in range(4)]
    alone = {attempt: run(ready(), entry)[0][attempt] for attempt, entry in enumerate(requests)}
    for entry in requests:
        core.submit(entry)
    while core.has_work():
        core.begin()
        core.end()
        assert core.load().kv_used_tokens <= 300
    core.report()
    assert core.scheduler.num_retractions > 0
    found: dict[int, list[int]] = {}
    for delta in core.deltas:
        found.setdefault(delta.attempt, []).extend(delta.ids)
        assert len(delta.ids) == sum(run.count for run in delta.runs)
    assert found == alone
    assert prefilled(core, 0) == 60, "the oldest is never retracted"
    assert sum(prefilled(core, attempt) for attempt in range(4)) > 240


def test_what_can_never_fit_is_refused_alone() -> None:
    core = ready(kv_capacity_tokens=300)
    core.submit(request(1, prompt(1, 60, 5), limit=250))
    assert [delta.finish for delta in core.deltas] == ["error"]
    assert "never fit" in core.deltas[0].error
    found, _ = run(core, request(2, prompt(2, 60, 240), limit=240))
    assert len(found[2]) == 240


# on a clock


class Driven:
    """An engine on a manual clock, and what it emitted at which second."""

    def __init__(self, **changes: Any) -> None:
        self.clock = ManualClock(0.0)
        self.deltas: list[tuple[float, Delta]] = []
        self.engine = EmulatedEngine(settings(**changes), self.clock)

    def emit(self, delta: Delta) -> None:
        self.deltas.append((self.clock.now(), delta))

    async def begin(self, *requests: GenerateRequest) -> None:
        take(self.engine._core, 1)
        for entry in requests:
            await self.engine.generate(entry, self.emit)

    def count(self, attempt: int = 1) -> int:
        return sum(len(delta.ids) for _, delta in self.deltas if delta.attempt == attempt)


async def test_passes_taken_together_come_to_the_same_as_one_by_one() -> None:
    """Requests that come and go in between included."""

    async def told(flush_period_s: float) -> list[Any]:
        driven = Driven(flush_period_s=flush_period_s, timing={"noise": 0.3})
        await driven.begin(request(1, prompt(1, 40, 60)), request(2, prompt(2, 300, 25)))
        for attempt in range(3, 30):
            driven.clock.advance(0.037)
            await driven.engine.generate(
                request(attempt, prompt(attempt, 10 * attempt, attempt)), driven.emit
            )
            if attempt % 3 == 0:
                driven.clock.advance(0.02)
                await driven.engine.abort(attempt - 1)
        driven.clock.advance(60.0)
        assert driven.engine.is_idle()
        stats = driven.engine.iteration_stats()
        tokens = {attempt: driven.count(attempt) for attempt in range(1, 30)}
        ends = {d.attempt: (round(at, 6), d.finish) for at, d in driven.deltas if d.finish}
        return [tokens, ends, [(s.num_decoding, s.prefill_tokens, s.context_tokens) for s in stats]]

    one_by_one, together = await told(0.0), await told(0.2)
    assert one_by_one == together


async def test_passes_end_at_absolute_deadlines() -> None:
    driven = Driven(flush_period_s=0.0)
    await driven.begin(request(1, prompt(1, 1, 400), 400))
    driven.clock.advance(A_S + PREFILL_S)  # the iteration of the prompt gives the first token
    for token in range(2, 51):
        driven.clock.advance(A_S + B_S)
        assert driven.count() == token
    assert driven.engine.deadline_miss.num_late == 0


async def test_a_host_that_was_late_catches_up_and_counts_it() -> None:
    driven = Driven()
    await driven.begin(request(1, prompt(1, 1, 1000), 1000))
    driven.clock.advance(A_S + PREFILL_S)
    driven.clock.stall(50 * (A_S + B_S))  # nothing runs for the time of fifty iterations
    driven.clock.advance(A_S + B_S)
    assert driven.engine.num_iterations in (51, 52)
    assert driven.engine.deadline_miss.num_late > 0
    assert driven.engine.deadline_miss.worst_s == pytest.approx(49 * (A_S + B_S), abs=1e-6)
    driven.clock.advance(49 * (A_S + B_S))
    assert driven.engine.num_iterations in (100, 101), "no drift"


async def test_a_process_that_was_stopped_for_long_does_not_get_all_its_time_back() -> None:
    driven = Driven()
    await driven.begin(request(1, prompt(1, 1, 10000), 10000))
    driven.clock.advance(A_S)
    driven.clock.stall(60.0)
    driven.clock.advance(A_S)
    assert driven.engine.num_iterations < 5 + (MAX_BEHIND_S + A_S) / (A_S + B_S)
    assert driven.engine.deadline_miss.given_up_s == pytest.approx(59.0, abs=0.1)


async def test_an_idle_engine_owes_no_time() -> None:
    driven = Driven()
    await driven.begin(request(1, prompt(1, 1, 2), 2))
    driven.clock.advance(100.0)
    await driven.engine.generate(request(2, prompt(2, 1, 2), 2), driven.emit)
    driven.clock.advance(A_S)
    assert driven.count(2) == 0
    driven.clock.advance(A_S + B_S + PREFILL_S)
    assert driven.count(2) == 2
    assert driven.engine.deadline_miss.num_late == 0


async def test_a_pause_waits_for_the_end_of_the_pass_and_counts_it() -> None:
    driven = Driven()
    await driven.begin(request(1, prompt(1, 1, 100), 100))
    driven.clock.advance(A_S / 2)
    async with asyncio.TaskGroup() as group:
        pausing = group.create_task(driven.engine.pause("abort"))
        await asyncio.sleep(0)
        assert not pausing.done()
        driven.clock.advance(A_S)
    assert [(delta.finish, len(delta.ids)) for _, delta in driven.deltas] == [(None, 1), ("abort", 0)]
    driven.clock.advance(10.0)
    assert driven.engine.num_iterations == 1


async def test_an_abort_needs_no_pass_to_end() -> None:
    driven = Driven()
    await driven.begin(request(1, prompt(1, 1, 100), 100), request(2, prompt(2, 1, 3), 3))
    driven.clock.advance(A_S / 2)
    await driven.engine.abort(1)
    assert [delta.finish for _, delta in driven.deltas] == ["abort"]
    driven.clock.advance(10.0)
    assert driven.count(2) == 3


async def until_done(clock: ManualClock, coroutine: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(coroutine)
        for _ in range(1000):
            await asyncio.sleep(0)
            if task.done():
                break
            clock.advance(0.01)
    return task.result()


async def test_memory_goes_and_comes_back_in_the_seconds_that_were_set() -> None:
    driven = Driven(timing={"release_seconds": 0.2, "activation_seconds": 0.4}, kv_capacity_tokens=1000)
    await driven.begin(request(1, prompt(1, 10, 5)))
    with pytest.raises(ValueError, match="pause with abort"):
        await driven.engine.release(("weights",))
    await driven.engine.pause("abort")
    began = driven.clock.now()
    released = await until_done(driven.clock, driven.engine.release(("weights", "kv_cache", "cuda_graph")))
    assert driven.clock.now() - began == pytest.approx(0.2, abs=0.02)
    assert released.num_bytes == NOMINAL_WEIGHT_BYTES + int(1000 * EmulatedConfig().kv_bytes_per_token)
    with pytest.raises(ValueError, match="restore it first"):
        await driven.engine.begin_update(Version(0, 2), TENSORS)
    began = driven.clock.now()
    await until_done(driven.clock, driven.engine.restore(("weights",)))
    take(driven.engine._core, 2)
    await driven.engine.continue_generation()
    await driven.engine.generate(request(2, prompt(1, 10, 5)), driven.emit)
    driven.clock.advance(5.0)
    assert driven.count(2) == 0, "without memory for KV"
    began = driven.clock.now()
    await until_done(driven.clock, driven.engine.restore(("kv_cache", "cuda_graph")))
    assert driven.clock.now() - began == pytest.approx(0.2, abs=0.02)
    driven.clock.advance(1.0)
    assert driven.count(2) == 5


def test_a_request_that_cannot_be_queued_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ready()

    def fail(*_: object) -> None:
        raise TypeError("no such answer")

    monkeypatch.setattr(core.scheduler, "add", fail)
    core.submit(request(1, prompt(1, 8, 4)))
    assert [(delta.attempt, delta.finish) for delta in core.deltas] == [(1, "error")]
    assert core.deltas[0].error == "it cannot be queued: TypeError: no such answer"
    monkeypatch.undo()
    assert run(core, request(2, prompt(1, 8, 4)))[0][2]


async def test_a_pass_that_raises_ends_all_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven()
    await driven.begin(request(1, prompt(1, 8, 4)))

    def fail(*_: object) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(driven.engine._core, "begin", fail)
    driven.clock.advance(1.0)
    await driven.engine.generate(request(2, prompt(1, 8, 4)), driven.emit)
    assert [(delta.attempt, delta.finish) for _, delta in driven.deltas] == [(1, "error"), (2, "error")]
    assert all("serves no more: a bug" in delta.error for _, delta in driven.deltas)
