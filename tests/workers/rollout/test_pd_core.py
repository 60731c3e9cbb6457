"""PairedRequests inside the engine core, step by step, with KV carried by hand."""

import msgspec
import numpy as np
import pytest
from engine_support import (
    Answer,
    all_pages_free,
    answers,
    greedy_reference,
    ids,
    ready_core,
    reference,
    request,
)

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import KvLayout, Layer, Offer
from pearl.workers.rollout.kv_transfer.pages import Begin, Ended, Expect, Granted, Landed, Notice, Ready
from pearl.workers.rollout.protocol import GenerateRequest
from pearl.workers.rollout.torch_engine.core import EngineCore
from pearl.workers.rollout.torch_engine.kv_blocks import layout_of

VERSION = Version(0, 1)


def pair(**settings: int) -> tuple[EngineCore, EngineCore]:
    prefill, decode = ready_core(), ready_core(**settings)
    prefill.set_role("prefill")
    decode.set_role("decode")
    return prefill, decode


def notices(core: EngineCore) -> list[Notice]:
    found, core.stages.notices = core.stages.notices, []
    return found


def submit(prefill: EngineCore, decode: EngineCore, whole: GenerateRequest) -> Ready:
    """Both stages, the prefill one computed and offered."""
    prefill.submit(msgspec.structs.replace(whole, pair="there"))
    decode.submit(msgspec.structs.replace(whole, pair="here"))
    assert notices(decode) == [Expect(whole.attempt, "here")]
    assert not decode.step(), "there is nothing to compute"
    while prefill.step():
        pass
    first, *_, ready = notices(prefill)
    assert first == Begin(whole.attempt, "there")
    assert isinstance(ready, Ready)
    assert ready.tokens == ready.total == len(whole.ids) - 1
    return ready


def offer(decode: EngineCore, ready: Ready, **changes: object) -> list[Notice]:
    made = msgspec.structs.replace(Offer(ready.version, ready.total, ready.layout), **changes)
    decode.kv_offered(ready.attempt, made)
    decode.step()
    return notices(decode)


def carry(prefill: EngineCore, decode: EngineCore, attempt: int, start: int, count: int) -> list[Notice]:
    block = prefill.kv_read(attempt, start, count)
    assert block is not None
    decode.kv_arrived(attempt, VERSION, start, count, block)
    return notices(decode)


def ended(core: EngineCore, attempt: int) -> Answer:
    while core.step():
        pass
    return answers(core.deltas)[attempt]


def test_kv_carried_in_uneven_pieces_decodes_as_if_computed_here() -> None:
    prefill, decode = pair()
    context = ids(1, 50)
    ready = submit(prefill, decode, request(1, context, 12, temperature=0.0))
    assert offer(decode, ready) == [Granted(1, 0)]
    assert carry(prefill, decode, 1, 0, 16) == []
    assert carry(prefill, decode, 1, 16, 13) == []
    assert not decode.step(), "it is not whole yet"
    assert carry(prefill, decode, 1, 29, 20) == [Landed(1)]
    prefill.kv_sent(1)
    assert prefill.is_idle
    last = prefill.deltas[-1]
    assert (last.prefilled_tokens, last.finish, last.is_last) == (49, None, True)
    assert ended(decode, 1).ids == greedy_reference(reference(1), context, 12)
    assert all_pages_free(prefill)
    assert all_pages_free(decode)


@pytest.mark.scenario("PD-05")
def test_kv_of_a_dead_attempt_never_lands_in_pages_given_to_another() -> None:
    prefill, decode = pair(kv_capacity_tokens=64)
    dead = submit(prefill, decode, request(1, ids(1, 50), 8, temperature=0.0))
    assert offer(decode, dead) == [Granted(1, 0)]
    carry(prefill, decode, 1, 0, 32)
    late = prefill.kv_read(1, 32, 17)
    assert late is not None
    decode.abort(1)
    assert notices(decode) == [Ended(1, "abort")]
    context = ids(2, 50)
    ready = submit(prefill, decode, request(2, context, 8, temperature=0.0))
    assert offer(decode, ready) == [Granted(2, 0)]
    carry(prefill, decode, 2, 0, 49)
    decode.kv_arrived(1, VERSION, 32, 17, late + 1)
    assert ended(decode, 2).ids == greedy_reference(reference(1), context, 8)
    prefill.kv_failed(1, "the other stage is gone")
    assert ended(prefill, 1).finish == "abort"


@pytest.mark.scenario("PD-09")
def test_kv_of_another_shape_is_refused_with_both_named() -> None:
    prefill, decode = pair()
    whole = submit(prefill, decode, request(1, ids(1, 20), 4))
    offer(decode, whole)
    carry(prefill, decode, 1, 0, 19)
    ended(decode, 1)
    ready = submit(prefill, decode, request(2, ids(2, 20), 4))
    halved = tuple(Layer(layer.index, 1, layer.key_size, layer.value_size) for layer in ready.layout.layers)
    assert offer(decode, ready, layout=KvLayout("float32", halved)) == [
        Ended(2, "the workers' KV differs: here float32, 2 layers, 2 heads of 16 + 16, "
                 "there float32, 2 layers, 1 heads of 16 + 16")
    ]  # fmt: skip
    assert ended(decode, 2).finish == "abort"


@pytest.mark.scenario("PD-09")
def test_the_first_offer_is_held_against_the_model() -> None:
    prefill, decode = pair()
    ready = submit(prefill, decode, request(1, ids(1, 20), 4))
    assert layout_of(decode._runner.store).layers == ()
    short = KvLayout("float32", ready.layout.layers[:1])
    assert offer(decode, ready, layout=short) == [Ended(1, "KV of 1 layers was offered to a model of 2")]


def test_kv_that_is_not_finite_hurts_its_own_attempt_only() -> None:
    prefill, decode = pair()
    ready = submit(prefill, decode, request(1, ids(1, 40), 4))
    offer(decode, ready)
    block = prefill.kv_read(1, 0, 39)
    assert block is not None
    decode.kv_arrived(1, VERSION, 0, 39, np.full_like(block, 0xFF))
    assert ended(decode, 1).finish == "error"
    notices(decode)
    context = ids(2, 40)
    after = submit(prefill, decode, request(2, context, 8, temperature=0.0))
    notices(decode)
    offer(decode, after)
    carry(prefill, decode, 2, 0, 39)
    assert ended(decode, 2).ids == greedy_reference(reference(1), context, 8)
