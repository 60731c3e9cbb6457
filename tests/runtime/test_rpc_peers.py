"""A server and its peers over real sockets: coming, going, and what breaks the protocol."""

import asyncio
import itertools
import logging

import pytest
from rpc_messages import (
    LIMIT_S,
    Answer,
    Order,
    RawPeer,
    Spoken,
    all_joined,
    answer,
    call,
    make_peer,
    make_server,
    next_one,
    next_order,
    outcome,
    serving,
    until,
    within,
)

from pearl.runtime.codec import Kind, encode
from pearl.runtime.errors import PeerGoneError, RefusedError, RemoteError
from pearl.runtime.inbound import Notification, PeerJoined, PeerLost
from pearl.runtime.rpc_client import RpcClient
from pearl.types.messages.control import Heartbeat, Hello

W0, W1 = "rollout.0.1", "rollout.1.1"


# coming and going


async def test_a_peer_is_heard_by_its_heartbeats() -> None:
    beats = itertools.count(1)
    async with make_server() as server:
        peer = make_peer(server.address, heartbeat=lambda: Heartbeat(next(beats), "loading", 3))
        async with serving(peer):
            joined = await next_one(server, PeerJoined)
            assert (joined.peer, joined.hello.slot, server.peers()) == (W0, 0, (W0,))
            first = server.last_heard(W0)
            assert (await next_one(server, Notification)).message == Heartbeat(1, "loading", 3)
            assert (await next_one(server, Notification)).message == Heartbeat(2, "loading", 3)
            assert server.last_heard(W0) > first


@pytest.mark.scenario("MQ-03")
async def test_nothing_is_sent_before_the_hello_and_nothing_after_it_is_lost() -> None:
    heard: list[int] = []

    async def handle(order: Order) -> None:
        heard.append(order.number)

    async with make_server() as server:
        peer = make_peer(server.address, handle)
        with pytest.raises(PeerGoneError, match=f"{W0} is not connected"):
            server.notify(W0, Order(0))
        async with serving(peer):
            await all_joined(server, 1)
            for number in range(8):
                server.notify(W0, Order(number))  # in the moment of joining
            await until(lambda: len(heard) == 8)
    assert heard == list(range(8))


@pytest.mark.scenario("MQ-03")
async def test_a_peer_that_is_up_before_the_coordinator_joins_when_that_comes() -> None:
    async with make_server() as server:
        address = server.address
    async with serving(make_peer(address)):
        await asyncio.sleep(0.05)
        async with make_server(address=address) as server:
            assert await all_joined(server, 1) == [W0]
            assert await call(server, W0, 1) == Answer(1)


async def test_who_does_not_know_the_run_learns_it_when_agents_and_admins_may_ask() -> None:
    async with make_server() as server:
        stranger = make_peer(server.address, run_id="")
        error = await outcome(stranger.run())
        assert isinstance(error, RefusedError)
        agent = RpcClient(
            server.address,
            hello=Hello("agent", 5, 1, "there", 1, ""),
            messages=Spoken,
            handler=answer,
            heartbeat=lambda: Heartbeat(progress=0),
            heartbeat_period_s=0.05,
            lease_s=LIMIT_S,
            queue_messages=16,
            max_frame_bytes=1 << 16,
        )
        async with serving(agent):
            assert await all_joined(server, 1) == ["agent.5.1"]
            assert await call(server, "agent.5.1", 1) == Answer(1)
            assert agent.run_id == "run"
            assert server.is_connected("agent.5.1")


async def test_whether_a_peer_is_connected_is_known_without_waiting_for_a_keepalive() -> None:
    async with make_server(keepalive_period_s=600.0) as server:
        async with serving(make_peer(server.address)):
            await all_joined(server, 1)
            assert server.is_connected(W0)
        async with asyncio.timeout(LIMIT_S):
            while server.is_connected(W0):  # noqa: ASYNC110  its goodbye crosses the loopback device
                await asyncio.sleep(0.005)


async def test_what_was_told_before_an_answer_can_be_waited_for() -> None:
    async def tell_then_answer(order: Order) -> Answer:
        for number in range(3):
            await peer.notify(Order(number))
        return Answer(order.number)

    async with make_server() as server, asyncio.TaskGroup() as group:
        peer = make_peer(server.address, tell_then_answer)
        running = group.create_task(peer.run())
        await all_joined(server, 1)
        assert await call(server, W0, 7) == Answer(7)
        caught_up = group.create_task(server.caught_up())
        for number in range(3):
            assert await next_order(server) == Order(number)
            await asyncio.sleep(0)
            assert not caught_up.done()  # the last one is taken, but not handled yet
        more = group.create_task(server.receive())
        await within(caught_up)
        for task in (more, running):
            task.cancel()


async def test_a_peer_of_another_run_is_refused_by_name() -> None:
    async with make_server() as server:
        error = await outcome(make_peer(server.address, run_id="other").run())
        assert isinstance(error, RefusedError)
        assert str(error) == f"{W0} is refused: it belongs to run 'other', this is run 'run'"
        assert (server.peers(), server.counters.refused) == ((), 1)


async def test_a_second_peer_under_the_name_is_refused_and_the_first_is_not_disturbed() -> None:
    async with make_server() as server, serving(make_peer(server.address, pid=41)):
        await all_joined(server, 1)
        error = await outcome(make_peer(server.address, pid=42).run())
        assert str(error) == f"{W0} is refused: there is a {W0} already: pid 41 on here"
        assert await call(server, W0, 1) == Answer(1)


@pytest.mark.scenario("MB-05")
async def test_the_next_incarnation_of_a_slot_gets_its_traffic_and_the_old_one_is_refused() -> None:
    async with make_server() as server:
        async with serving(make_peer(server.address)):
            await all_joined(server, 1)
            server.drop(W0, "dead")
        async with serving(make_peer(server.address, incarnation=2)):
            assert await all_joined(server, 1) == ["rollout.0.2"]
            assert await call(server, "rollout.0.2", 1) == Answer(1)
            error = await outcome(make_peer(server.address).run())
            assert str(error) == f"{W0} is refused: incarnation 2 of it has been here since"


@pytest.mark.scenario("ME-03")
async def test_refusals_without_end_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pearl.runtime.rpc_server")
    async with make_server() as server:
        for _ in range(50):
            await outcome(make_peer(server.address, run_id="other").run())
        assert server.counters.refused == 50
    assert len([record for record in caplog.records if record.name == "pearl.runtime.rpc_server"]) == 1


@pytest.mark.scenario("ME-03")
async def test_a_lost_connection_and_its_return_are_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pearl.runtime.rpc_server")
    async with make_server(keepalive_period_s=0.005) as server:
        raw = RawPeer(server.address, "raw")
        await raw.join(Hello("rollout", 0, 1, "here", 1, "run"))
        raw.close()
        await until(lambda: "no connection" in caplog.text)
        await asyncio.sleep(0.1)  # twenty keepalives
        assert caplog.text.count("no connection") == 1


async def test_who_only_asks_is_forgotten_when_it_went() -> None:
    async with make_server(keepalive_period_s=0.005) as server:
        raw = RawPeer(server.address, "raw")
        await raw.join(Hello("admin", 0, 77, "here", 1, "run"))
        assert server.peers() == ("admin.0.77",)
        raw.close()
        await until(lambda: server.peers() == ())


def test_an_address_that_is_taken_is_refused_with_the_way_out() -> None:
    async def listen_twice() -> None:
        async with make_server() as server:
            with pytest.raises(ValueError, match=f"runtime.address = '{server.address}'.*port 0"):
                async with make_server(address=server.address):
                    pass
        with pytest.raises(ValueError, match="'nonsense'"):
            async with make_server(address="nonsense"):
                pass

    asyncio.run(listen_twice())


# what breaks the protocol


async def test_malformed_messages_are_counted_and_answered_and_hurt_nobody() -> None:
    async with make_server() as server, serving(make_peer(server.address, slot=1)):
        await all_joined(server, 1)
        raw = RawPeer(server.address, "raw")
        await raw.join(Hello("rollout", 0, 1, "here", 1, "run"))
        raw.say(Kind.TELL, 0, encode({"type": "Order", "number": "x"}))
        raw.say(Kind.ASK, 7, encode({"type": "Nonsense"}))
        error = await raw.hear(Kind.ERROR)
        assert error.op == 7
        assert b"Nonsense" in bytes(error.body)
        assert server.counters.malformed == 2
        assert set(server.peers()) == {W0, W1}
        raw.send(b"\xc1")
        lost = await next_one(server, PeerLost)
        assert lost.peer == W0
        assert lost.reason.startswith("sent an invalid frame")
        assert await call(server, W1, 1) == Answer(1)
        raw.close()


async def test_an_answer_that_cannot_be_read_ends_its_ask() -> None:
    async with make_server() as server, asyncio.TaskGroup() as group:
        raw = RawPeer(server.address, "raw")
        await raw.join(Hello("rollout", 0, 1, "here", 1, "run"))
        asking = group.create_task(outcome(server.call(W0, Order(1), deadline_s=LIMIT_S)))
        envelope = await raw.hear(Kind.ASK)
        raw.say(Kind.REPLY, envelope.op, encode({"type": "Answer"}))
        error = await asking
        assert isinstance(error, RemoteError)
        assert error.kind == "MalformedError"
        raw.close()


async def test_a_stranger_is_told_once_that_it_is_not_known() -> None:
    async with make_server() as server:
        raw = RawPeer(server.address, "raw")
        for _ in range(20):
            raw.say(Kind.TELL, 0, encode(Order(1)))
        assert b"not known" in bytes((await raw.hear(Kind.REFUSAL)).body)
        await until(lambda: server.counters.stale_messages == 20)
        raw.close()
