"""The torch engine pass by pass."""

import numpy as np
import pytest
import torch
from engine_support import (
    VOCABULARY,
    all_pages_free,
    answers,
    generate_one,
    greedy_reference,
    ids,
    image,
    ready_core,
    reference,
    reference_logprobs,
    request,
    run,
    steps,
)

from pearl.types.weights import Version
from pearl.workers.rollout.torch_engine.request import Request


def test_greedy_tokens_equal_those_of_generate_in_a_mixed_batch() -> None:
    core = ready_core()
    contexts = [ids(seed, count) for seed, count in enumerate((1, 5, 16, 17, 40, 200))]
    found = run(core, *[request(i, context, 24, temperature=0.0) for i, context in enumerate(contexts)])
    for i, context in enumerate(contexts):
        assert found[i].ids == greedy_reference(reference(1), context, 24)
        assert found[i].finish == "length"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.scenario("LP-01")
def test_logprobs_are_those_of_the_scaled_logits(temperature: float) -> None:
    core = ready_core()
    contexts = [ids(seed, 10 + 7 * seed) for seed in range(6)]
    found = run(core, *[request(i, c, 20, temperature=temperature) for i, c in enumerate(contexts)])
    for i, context in enumerate(contexts):
        expected = reference_logprobs(reference(1), context, found[i].ids, temperature)
        assert found[i].logprobs == pytest.approx(expected, abs=1e-4)


def test_a_later_turn_reuses_all_kv_of_the_earlier_ones_to_the_token() -> None:
    core = ready_core()
    context = ids(3, 37)
    prefilled = []
    for turn in range(3):
        answer = generate_one(core, request(turn, context, 9, seed=5))
        prefilled.append(answer.prefilled)
        context = np.concatenate([context, np.array(answer.ids, np.int32), ids(50 + turn, 6)])
    # The last token of a turn never had its KV computed: it is prefilled with the observation.
    assert prefilled == [37, 7, 7]
    cold = ready_core()
    assert generate_one(cold, request(0, context, 5, seed=5)).ids == (
        generate_one(core, request(9, context, 5, seed=5)).ids
    )


def test_a_group_computes_its_common_prompt_once() -> None:
    core = ready_core()
    prompt = ids(1, 45)
    found = run(core, *[request(member, prompt, 6) for member in range(8)])
    assert sorted(answer.prefilled for answer in found.values()) == [1] * 7 + [45]
    assert len({tuple(answer.ids) for answer in found.values()}) > 1
    alone = ready_core()
    assert generate_one(alone, request(7, prompt, 6)).ids == found[7].ids


def test_prompts_that_part_inside_a_page_share_what_they_have_in_common() -> None:
    core = ready_core()
    prompt = ids(1, 40)
    other = prompt.copy()
    other[30] = (other[30] + 1) % VOCABULARY
    generate_one(core, request(0, prompt, 1))
    answer = generate_one(core, request(1, other, 4, temperature=0.0))
    assert answer.prefilled == 10
    assert answer.ids == greedy_reference(reference(1), other, 4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_prefill_in_one_piece(chunk: int) -> None:
    whole = ready_core(prefill_chunk_tokens=4096)
    chunked = ready_core(prefill_chunk_tokens=chunk)
    context = ids(2, 130)
    one, many = (generate_one(core, request(0, context, 10)) for core in (whole, chunked))
    assert many.ids == one.ids
    assert many.logprobs == pytest.approx(one.logprobs, abs=1e-5)
    assert many.prefilled == one.prefilled == 130
    assert chunked.num_iterations == -(-130 // chunk) + 9


def test_a_long_prompt_does_not_starve_decoding_requests() -> None:
    core = ready_core(prefill_chunk_tokens=8)
    core.submit(request(0, ids(0, 8), 30))
    steps(core, 1)
    core.submit(request(1, ids(1, 160), 4))
    steps(core, 20)
    assert len(answers(core.deltas)[0].ids) == 21
    assert run(core)[1].finish == "length"


def test_the_same_seed_continues_an_aborted_answer_alike() -> None:
    context = ids(4, 20)
    straight = generate_one(ready_core(), request(0, context, 30, seed=11))
    core = ready_core()
    core.submit(request(0, context, 30, seed=11))
    steps(core, 12)
    core.abort(0)
    first = answers(core.deltas)[0]
    assert (len(first.ids), first.finish) == (12, "abort")
    resumed = np.concatenate([context, np.array(first.ids, np.int32)])
    rest = generate_one(core, request(1, resumed, 18, seed=11))
    assert first.ids + rest.ids == straight.ids
    assert rest.prefilled == 1


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    contexts = [ids(seed, 5 + 3 * seed) for seed in range(12)]
    together = run(ready_core(), *[request(i, c, 12) for i, c in enumerate(contexts)])
    for i in (0, 5, 11):
        alone = generate_one(ready_core(), request(i, contexts[i], 12))
        assert alone.ids == together[i].ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-4)


def test_the_youngest_is_retracted_when_pages_run_out_and_nothing_is_lost() -> None:
    contexts = [ids(seed, 20) for seed in range(4)]
    roomy = run(ready_core(), *[request(i, c, 60) for i, c in enumerate(contexts)])
    core = ready_core(kv_capacity_tokens=12 * 16)
    tight = run(core, *[request(i, c, 60) for i, c in enumerate(contexts)])
    assert core.scheduler.num_retractions > 0
    assert {i: a.ids for i, a in tight.items()} == {i: a.ids for i, a in roomy.items()}
    assert all(answer.finish == "length" for answer in tight.values())
    assert all_pages_free(core)


@pytest.mark.scenario("PR-01")
def test_an_abort_keeps_what_running_retracted_and_queued_requests_made() -> None:
    core = ready_core(max_running=2)
    contexts = [ids(seed, 12) for seed in range(3)]
    straight = run(ready_core(), *[request(i, c, 60) for i, c in enumerate(contexts)])
    for i, context in enumerate(contexts):
        core.submit(request(i, context, 60))
    steps(core, 40)
    core.scheduler.retract(core.scheduler.running[-1])
    for attempt in range(3):
        core.abort(attempt)
    found = answers(core.deltas)
    assert [len(found[i].ids) for i in range(3)] == [40, 40, 0]
    assert all(answer.finish == "abort" for answer in found.values())
    for i, context in enumerate(contexts):
        kept = found[i].ids
        longer = np.concatenate([context, np.array(kept, np.int32)])
        rest = generate_one(core, request(10 + i, longer, 60 - len(kept), seed=i))
        assert kept + rest.ids == straight[i].ids
        assert rest.finish == "length"
    assert all_pages_free(core)


@pytest.mark.scenario("PR-03")
def test_a_resumed_answer_stops_at_what_is_still_allowed() -> None:
    core = ready_core()
    context, asked, total = ids(1, 10), [100, 40, 10], 0
    for attempt, (limit, stop_after) in enumerate(zip(asked, (60, 30, None), strict=True)):
        before = len(core.deltas)
        core.submit(request(attempt, context, limit, seed=3))
        if stop_after is None:
            run(core)
        else:
            steps(core, stop_after)
            core.abort(attempt)
        answer = answers(core.deltas[before:])[attempt]
        total += len(answer.ids)
        context = np.concatenate([context, np.array(answer.ids, np.int32)])
    assert (total, answer.finish) == (100, "length")


@pytest.mark.scenario("TK-05")
def test_each_stop_id_ends_the_answer_once_and_a_length_stop_adds_none() -> None:
    context = ids(6, 12)
    straight = generate_one(ready_core(), request(0, context, 40, seed=2)).ids
    second = next(i for i in range(1, 40) if straight[i] not in straight[:i])
    for stop in (straight[0], straight[second]):
        answer = generate_one(ready_core(), request(0, context, 40, seed=2, stop_ids=(stop, 31)))
        end = min(straight.index(stop), straight.index(31) if 31 in straight else 40)
        assert answer.ids == straight[: end + 1]
        assert len(answer.logprobs) == end + 1
        assert answer.finish == "stop"
    cut = generate_one(ready_core(), request(0, context, 1, seed=2, stop_ids=(straight[1],)))
    assert (cut.ids, cut.finish) == ([straight[0]], "length")
    last = generate_one(ready_core(), request(0, context, 1, seed=2, stop_ids=(straight[0],)))
    assert (last.ids, last.finish) == ([straight[0]], "stop")


@pytest.mark.scenario("LP-02")
def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    core = ready_core()
    poison, contexts = 7, [ids(seed, 30) for seed in range(4)]
    for context in contexts:
        context[context == poison] = 8
    contexts[2][25] = poison
    embedding = core._runner.model.get_input_embeddings().weight
    clean = run(ready_core(), *[request(i, c, 1) for i, c in enumerate(contexts)])
    with torch.no_grad():
        # The output layer is untied first: the poisoned row may only be met as an input.
        core._runner.model.lm_head.weight = torch.nn.Parameter(embedding.detach().clone())
        embedding[poison] = float("nan")
    found = run(core, *[request(i, c, 1) for i, c in enumerate(contexts)])
    assert (found[2].finish, found[2].ids) == ("error", [])
    assert "not finite" in found[2].error
    for i in (0, 1, 3):
        assert (found[i].ids, found[i].finish) == (clean[i].ids, "length")
    # Pages that held the bad keys serve others without harm.
    again = run(core, *[request(10 + i, contexts[i], 1, seed=i) for i in (0, 1, 3)])
    assert [again[10 + i].ids for i in (0, 1, 3)] == [clean[i].ids for i in (0, 1, 3)]
    assert all_pages_free(core)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (request(0, ids(0, 150), 20), "never fit"),
        (request(0, [], 4), "empty"),
        (request(0, [1, VOCABULARY], 4), f"token id {VOCABULARY}"),
        (request(0, [-1], 4), "token id -1"),
        (request(0, [1], 4, temperature=-1.0), "temperature"),
        (request(0, [1], -1), "max_new_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(entry: object, text: str) -> None:
    core = ready_core(kv_capacity_tokens=160)
    core.submit(request(1, ids(1, 4), 3))
    core.submit(entry)  # type: ignore[arg-type]
    found = run(core)
    assert found[0].finish == "error"
    assert text in found[0].error
    assert found[1].finish == "length"


def test_a_failing_pass_ends_its_requests_and_later_ones_are_served() -> None:
    core = ready_core()
    forward = core._runner.model.forward

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    core._runner.model.forward = fail
    found = run(core, request(0, ids(0, 5), 3), request(1, ids(1, 5), 3))
    assert all(answer.finish == "error" and "out of memory" in answer.error for answer in found.values())
    core._runner.model.forward = forward
    assert generate_one(core, request(2, ids(0, 5), 3)).finish == "length"
    assert all_pages_free(core)


def test_longest_unused_prefixes_are_evicted_first() -> None:
    core = ready_core(kv_capacity_tokens=8 * 16)
    old, recent = ids(1, 48), ids(2, 48)
    generate_one(core, request(0, old, 1))
    generate_one(core, request(1, recent, 1))
    generate_one(core, request(2, ids(3, 48), 1))
    assert generate_one(core, request(3, recent, 1)).prefilled == 1
    assert generate_one(core, request(4, old, 1)).prefilled > 1


def test_every_token_carries_its_version() -> None:
    core = ready_core()
    answer = generate_one(core, request(0, ids(0, 9), 5))
    assert {(run_.version, run_.kv_version) for run_ in answer.runs} == {(Version(0, 1), Version(0, 1))}
    assert image(1).version == core.version


def test_a_request_that_cannot_be_queued_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ready_core()
    add = core.scheduler.add

    def fail_once(entry: Request) -> None:
        if entry.attempt == 1:
            raise KeyError("\ud800 no such page")
        add(entry)

    monkeypatch.setattr(core.scheduler, "add", fail_once)
    found = run(core, request(0, ids(1, 9), 4), request(1, ids(2, 9), 4), request(2, ids(3, 9), 4))
    assert [found[i].finish for i in range(3)] == ["length", "error", "length"]
    assert found[1].error == r"it cannot be queued: KeyError: '\ud800 no such page'"
    assert core.is_idle


def test_a_wish_for_more_tokens_than_there_can_be_costs_no_memory() -> None:
    core = ready_core()
    found = run(core, request(0, ids(1, 9), 1 << 60), request(1, ids(2, 9), 4))
    assert found[0].finish == "error"
    assert "never fit" in found[0].error
    assert found[1].finish == "length"
