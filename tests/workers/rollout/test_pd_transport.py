"""The transport alone: whole and verified bytes through real sockets, bounded, and every step within its limit."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from kv_peers import (
    LAYOUT,
    LIMIT_S,
    QUICK,
    VERSION,
    WIDTH,
    address_of,
    chunk,
    decode_peer,
    engines,
    kv,
    prefill_peer,
)

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import (
    AnyFrame,
    Done,
    Failed,
    Grant,
    Hello,
    KvLayout,
    Offer,
)
from pearl.workers.rollout.kv_transfer.limits import KvLimits


async def test_all_bytes_arrive_in_order_and_both_sides_are_told() -> None:
    async with engines(2, replace(KvLimits(), chunk_bytes=10 * WIDTH)) as (source, sink):
        for attempt in range(20):
            sink.expect(attempt)
            source.begin(attempt, address_of(sink), 37 + attempt)
        for attempt in range(20):
            assert await sink.outcome(attempt) == "landed"
            assert await source.outcome(attempt) == "sent"
            assert (np.concatenate(sink.landed[attempt]) == kv(0, 37 + attempt)).all()
            assert max(len(block) for block in sink.landed[attempt]) == 10 * WIDTH


async def test_either_half_may_be_first_and_what_is_cached_is_not_sent() -> None:
    async with engines(2) as (source, sink):
        sink.start = 30
        source.begin(1, address_of(sink), 50)
        sink.expect(1)
        sink.expect(2)
        source.begin(2, address_of(sink), 30)
        assert [await sink.outcome(a) for a in (1, 2)] == ["landed"] * 2
        assert [await source.outcome(a) for a in (1, 2)] == ["sent"] * 2
        assert (np.concatenate(sink.landed[1]) == kv(30, 20)).all()
        assert 2 not in sink.landed


async def test_pages_travel_over_ipv6() -> None:
    async with engines(2, host="::1") as (source, sink):
        assert address_of(sink).startswith("[::1]:")
        sink.expect(1)
        source.begin(1, address_of(sink), 50)
        assert await sink.outcome(1) == "landed"
        assert (np.concatenate(sink.landed[1]) == kv(0, 50)).all()


async def test_a_slow_engine_bounds_what_is_on_the_way_and_hurts_no_other_peer() -> None:
    window, chunk_bytes = 4096 * WIDTH, 1024 * WIDTH
    limits = replace(KvLimits(), chunk_bytes=chunk_bytes, window_bytes=window)
    num_tokens = 1 << 18  # 64 MiB: more than the kernel's buffers take
    async with engines(3, limits) as (source, slow, quick):
        slow.landing.clear()
        source.other = slow
        slow.expect(1)
        source.begin(1, address_of(slow), num_tokens)
        quick.expect(2)
        source.begin(2, address_of(quick), 1000)
        assert await quick.outcome(2) == "landed"
        slow.landing.set()
        assert await slow.outcome(1) == "landed"
        kernel = 16 << 20
        assert source.most_ahead <= 2 * window + kernel + 1000 * WIDTH < num_tokens * WIDTH / 2


OFFER = Offer(VERSION, 8, LAYOUT)
DATA = kv(0, 4).tobytes()
Said = tuple[AnyFrame | bytes, ...]
PREFILL_FAULTS: dict[str, tuple[Said, bytes, str]] = {
    "silence": ((), b"", "hearing from the peer took over 0.4 s"),
    "says why": ((Failed("it was aborted"),), b"", "rollout.0.1 says: it was aborted"),
    "not a frame": ((b"\x02\x00\x00\x00\xc1\xc1",), b"", "not a frame"),
    "huge frame": ((b"\xff\xff\xff\x7f",), b"", "a frame of 2147483647 bytes"),
    "wrong frame": ((Done(),), b"", "Done from the prefill side"),
    "unknown dtype": ((Offer(VERSION, 8, KvLayout("int3", ())),), b"", "dtype 'int3'"),
    "offers twice": ((OFFER, OFFER), b"", "offered twice"),
    "no offer": ((chunk(0, 4),), DATA, "before there were pages"),
    "silence after its offer": ((OFFER,), b"", "hearing from the peer took over 0.4 s"),
    "half a chunk": ((OFFER, chunk(0, 4)), DATA[:100], "receiving 1024 bytes took over 0.3 s"),
    "corrupt": ((OFFER, chunk(0, 4)), kv(1, 4).tobytes(), "arrived corrupt"),
    "a gap": ((OFFER, chunk(2, 4)), DATA, "not those from 0"),
    "too many": ((OFFER, chunk(0, 9)), DATA, "not those from 0"),
    "wrong length": ((OFFER, chunk(0, 3, num_bytes=1024)), DATA, "3 tokens came as 1024 bytes"),
    "other version": ((OFFER, chunk(0, 4, version=Version(0, 2))), DATA, "at version"),
    "other attempt": ((OFFER, chunk(0, 4, attempt=2)), DATA, "KV of attempt 2"),
}


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
@pytest.mark.scenario("PD-01")
async def test_a_prefill_side_that_fails_ends_the_decode_half_in_time(fault: str) -> None:
    said, payload, reason = PREFILL_FAULTS[fault]
    async with engines(1, QUICK) as (sink,), prefill_peer(sink, 1) as peer:
        sink.expect(1)
        for index, frame in enumerate(said):
            peer.say(frame)
            if index == 0 and frame is OFFER:
                assert await peer.hear() == Grant(0)
        peer.writer.write(payload)
        assert reason in await sink.outcome(1)
        assert 1 not in sink.landed


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.scenario("PD-01")
async def test_a_cut_connection_ends_the_decode_half_at_once(how: str) -> None:
    async with engines(1) as (sink,), prefill_peer(sink, 1) as peer:
        sink.expect(1)
        peer.say(OFFER)
        assert await peer.hear() == Grant(0)
        if how == "closed":
            peer.writer.close()
        else:
            peer.writer.transport.abort()
        outcome = await sink.outcome(1)
        assert "closed the connection" in outcome or "reset by peer" in outcome


DECODE_FAULTS: dict[str, tuple[Said, str]] = {
    "silence": ((), "hearing from the peer took over 0.7 s"),
    "says why": ((Failed("there is no room"),), "the decode worker says: there is no room"),
    "not a frame": ((b"\x01\x00\x00\x00\xc1",), "not a frame"),
    "wrong frame": ((OFFER,), "Offer from the decode side"),
    "grants too far": ((Grant(9),), "from token 9 of 8"),
    "grants twice": ((Grant(0), Grant(0)), "that were not asked for"),
    "done too early": ((Done(),), "before all was sent"),
    "silence after its grant": ((Grant(0),), "hearing from the peer took over 0.4 s"),
}


@pytest.mark.parametrize("fault", DECODE_FAULTS)
@pytest.mark.scenario("PD-01")
async def test_a_decode_side_that_fails_ends_the_prefill_half_in_time(fault: str) -> None:
    said, reason = DECODE_FAULTS[fault]
    async with engines(1, QUICK) as (source,), decode_peer() as (address, met):
        source.begin(1, address, 8)
        peer = await met
        assert isinstance(await peer.hear(), Hello)
        assert isinstance(await peer.hear(), Offer)
        for frame in said:
            peer.say(frame)
        assert reason in await source.outcome(1)


async def test_a_decode_side_that_does_not_read_ends_the_prefill_half_in_time() -> None:
    async with engines(1, replace(QUICK, silence_s=LIMIT_S)) as (source,), decode_peer() as (address, met):
        source.begin(1, address, 1 << 18)
        peer = await met
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        peer.say(Grant(0))
        assert "sending Chunk took over 0.3 s" in await source.outcome(1)


async def test_nobody_at_the_address_is_said_at_once() -> None:
    async with engines(1) as (source,):
        for attempt, address in enumerate(("127.0.0.1:1/token", "nonsense", "10.0.0.1:x/y")):
            source.begin(attempt, address, 8)
        assert "reaching 127.0.0.1:1" in await source.outcome(0)
        for attempt in (1, 2):
            assert "is no KV address host:port/token" in await source.outcome(attempt)


@pytest.mark.scenario("PD-05")
async def test_a_half_whose_other_half_never_comes_ends_within_its_limit() -> None:
    async with engines(2, QUICK) as (source, sink):
        sink.expect(1)
        assert await sink.outcome(1) == "rollout.0.1 did not get in touch within 0.3 s"
        source.begin(2, address_of(sink), 8)
        assert "no decode stage of attempt 2 is here" in await source.outcome(2)


async def test_a_process_behind_an_old_address_is_told_apart() -> None:
    async with engines(1) as (sink,), prefill_peer(sink, 1, token="another") as peer:
        sink.expect(1)
        answer = await peer.hear()
        assert isinstance(answer, Failed)
        assert "another worker than the one that was meant" in answer.reason
        async with prefill_peer(sink, 1) as right:
            right.say(OFFER)
            assert await right.hear() == Grant(0)
            right.say(Failed("enough"))
            assert "enough" in await sink.outcome(1)


async def test_a_second_connection_for_an_attempt_is_turned_away() -> None:
    async with engines(1) as (sink,), prefill_peer(sink, 1) as first:
        sink.expect(1)
        first.say(OFFER)
        assert await first.hear() == Grant(0)
        async with prefill_peer(sink, 1) as second:
            answer = await second.hear()
            assert isinstance(answer, Failed)
            assert "in other hands" in answer.reason
        first.say(chunk(0, 8), kv(0, 8).tobytes())
        assert await first.hear() == Done()
        assert await sink.outcome(1) == "landed"


async def test_nothing_moving_has_a_limit_even_while_both_sides_live() -> None:
    async with engines(2, QUICK) as (source, sink):
        sink.grants = False
        sink.expect(1)
        source.begin(1, address_of(sink), 8)
        ends = [await source.outcome(1), await sink.outcome(1)]
        assert any("nothing moved for 1.5 s" in end for end in ends)


async def test_an_engine_that_does_not_answer_ends_the_attempt() -> None:
    async with engines(2, QUICK) as (source, sink):
        sink.landing.clear()
        sink.expect(1)
        source.begin(1, address_of(sink), 8)
        assert await sink.outcome(1) == "the engine did not answer within 0.4 s"
        assert "the engine did not answer" in await source.outcome(1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.scenario("PD-05")
async def test_an_abort_in_the_middle_reaches_the_other_side_at_once(side: str) -> None:
    async with engines(2) as (source, sink):
        sink.landing.clear()
        sink.expect(1)
        source.begin(1, address_of(sink), 1 << 18)
        async with asyncio.timeout(LIMIT_S):
            while 1 not in sink.totals:
                await asyncio.to_thread(lambda: None)
        (source if side == "prefill" else sink).end(1, "aborted by a test")
        other = sink if side == "prefill" else source
        sink.landing.set()
        assert "aborted by a test" in await other.outcome(1) or "closed the connection" in other.outcomes[1]
        mine = source if side == "prefill" else sink
        assert 1 not in mine.outcomes, "the engine knows already"


async def test_closing_frees_the_port_and_ends_what_runs() -> None:
    async with engines(2) as (source, sink):
        sink.landing.clear()
        sink.expect(1)
        source.begin(1, address_of(sink), 1 << 18)
        assert source.transport is not None
        assert sink.transport is not None
        await asyncio.to_thread(sink.transport.close)
        outcome = await source.outcome(1)
        assert outcome
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", sink.transport.address.port)
        sink.landing.set()
