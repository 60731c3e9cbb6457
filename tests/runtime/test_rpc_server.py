"""A server and its peers over real sockets: telling and asking."""

import asyncio
import itertools
import time
from collections.abc import Awaitable

import pytest
from rpc_messages import (
    LIMIT_S,
    Answer,
    Order,
    RawPeer,
    all_joined,
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
from pearl.runtime.errors import FrameTooLargeError, PeerGoneError, RemoteError
from pearl.runtime.inbound import Call, PeerLost
from pearl.runtime.supervisor import TaskFailedError
from pearl.testing.manual_clock import ManualClock
from pearl.types import tcp_address
from pearl.types.messages.control import Ack, Heartbeat, Hello, Shutdown

W0, W1 = "rollout.0.1", "rollout.1.1"


# telling and asking


async def test_notifications_arrive_in_order_and_calls_are_answered() -> None:
    heard: list[int] = []

    async def handle(order: Order) -> Answer | None:
        if order.number < 0:
            return Answer(len(heard))
        heard.append(order.number)
        return None

    async with make_server() as server, serving(make_peer(server.address, handle)):
        await all_joined(server, 1)
        for number in range(1000):
            server.notify(W0, Order(number))
        await until(lambda: len(heard) == 1000)
        assert heard == list(range(1000))
        assert await call(server, W0, -1) == Answer(1000)
        assert await within(server.call(W0, Order(5), deadline_s=LIMIT_S)) == Ack()


@pytest.mark.parametrize("address", ["tcp://[::1]:0", "tcp://[::]:0"])
async def test_a_server_may_listen_on_ipv6(address: str) -> None:
    async def handle(order: Order) -> Answer | None:
        return Answer(order.number)

    async with make_server(address=address) as server:
        place = tcp_address.parse(server.address)
        assert place.is_ipv6
        assert place.port
        # Who listens on all addresses is reached over IPv4 too.
        hosts = ["::1"] if "::1" in address else ["::1", "127.0.0.1"]
        for slot, host in enumerate(hosts):
            peer = make_peer(f"tcp://{tcp_address.join(host, place.port)}", handle, slot=slot)
            async with serving(peer):
                await all_joined(server, 1)
                assert await call(server, f"rollout.{slot}.1", 7) == Answer(7)


async def test_a_peer_notifies_and_calls_too() -> None:
    async with make_server() as server:
        peer = make_peer(server.address)
        async with serving(peer), asyncio.TaskGroup() as group:
            await peer.notify(Order(1))  # waits for the hello's answer
            assert await next_order(server) == Order(1)
            asking = group.create_task(peer.call(Order(2), deadline_s=LIMIT_S))
            asked = await next_one(server, Call)
            assert (asked.peer, asked.message) == (W0, Order(2))
            asked.reply(Answer(2))
            assert await within(asking) == Answer(2)
            failing = group.create_task(outcome(peer.call(Order(3), deadline_s=LIMIT_S)))
            (await next_one(server, Call)).fail(KeyError("unknown"))
            assert str(await failing) == "KeyError: 'unknown'"


async def test_what_a_handler_raises_is_the_answer_and_hurts_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(order: Order) -> Answer:
        match order.number:
            case 0:
                raise ValueError("no order 0")
            case 1:
                raise KeyError("a bug")
        return Answer(order.number)

    async with make_server() as server, serving(make_peer(server.address, handle)):
        await all_joined(server, 1)
        with pytest.raises(RemoteError, match="ValueError: no order 0") as raised:
            await call(server, W0, 0)
        assert (raised.value.kind, raised.value.text) == ("ValueError", "no order 0")
        assert "Traceback" not in caplog.text
        with pytest.raises(RemoteError, match="KeyError: 'a bug'"):
            await call(server, W0, 1)
        assert "Traceback" in caplog.text
        assert await call(server, W0, 2) == Answer(2)
        with pytest.raises(RemoteError, match=f"{W0} answered Order with Answer, not Ack"):
            await server.call(W0, Order(3), deadline_s=LIMIT_S, reply_type=Ack)


async def test_an_answer_past_its_deadline_is_named_dropped_and_counted() -> None:
    may_answer = asyncio.Event()

    async def handle(order: Order) -> Answer:
        await may_answer.wait()
        return Answer(order.number)

    async with make_server() as server, serving(make_peer(server.address, handle)):
        await all_joined(server, 1)
        with pytest.raises(TimeoutError, match=f"{W0} did not answer Order within 0.05 s"):
            await call(server, W0, 1, deadline_s=0.05)
        may_answer.set()
        await until(lambda: server.late_replies == 1)
        assert await call(server, W0, 2) == Answer(2)


async def test_an_asker_that_is_cancelled_leaves_nothing_behind() -> None:
    may_answer = asyncio.Event()

    async def handle(order: Order) -> Answer:
        await may_answer.wait()
        return Answer(order.number)

    async with make_server() as server, serving(make_peer(server.address, handle)):
        await all_joined(server, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await server.call(W0, Order(1), deadline_s=LIMIT_S)
        may_answer.set()
        await until(lambda: server.late_replies == 1)


async def test_what_is_asked_of_a_dropped_peer_fails_with_the_reason_and_the_peer_ends() -> None:
    async with make_server() as server:
        peer = make_peer(server.address, lambda _: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
        async with serving(peer) as [running], asyncio.TaskGroup() as group:
            await all_joined(server, 1)
            asking = group.create_task(outcome(server.call(W0, Order(1), deadline_s=LIMIT_S)))
            await asyncio.sleep(0)
            server.drop(W0, "silent for 10 s")
            assert isinstance(await asking, PeerGoneError)
            assert str(await asking) == f"{W0} is gone: silent for 10 s"
            assert await within(running) == "dropped by the coordinator: silent for 10 s"
            with pytest.raises(PeerGoneError):
                server.notify(W0, Order(2))
            with pytest.raises(PeerGoneError):
                await peer.notify(Order(2))
            server.drop(W0, "again")  # changes nothing
            assert server.peers() == ()


async def test_shutdown_ends_the_peer_and_what_it_was_asked() -> None:
    cancelled = []

    async def handle(order: Order) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(order.number)

    async with (
        make_server() as server,
        serving(make_peer(server.address, handle)) as [running],
        asyncio.TaskGroup() as group,
    ):
        await all_joined(server, 1)
        group.create_task(outcome(server.call(W0, Order(1), deadline_s=LIMIT_S)))
        await asyncio.sleep(0)
        server.notify(W0, Shutdown("the run is over"))
        assert await within(running) == "shutdown: the run is over"
        assert cancelled == [1]
        server.drop(W0, "it ended")


@pytest.mark.scenario("PL-06")
async def test_a_handler_that_fails_on_a_notification_ends_the_peer_with_that_error() -> None:
    async def handle(order: Order) -> None:
        raise KeyError("a bug")

    async with make_server() as server, asyncio.TaskGroup() as group:
        running = group.create_task(outcome(make_peer(server.address, handle).run()))
        await all_joined(server, 1)
        server.notify(W0, Order(1))
        error = await within(running)
        assert isinstance(error, TaskFailedError)
        assert "task 'notifications' failed: KeyError: 'a bug'" in str(error)


@pytest.mark.scenario("PL-06")
async def test_a_heartbeat_that_fails_ends_the_peer_with_that_error() -> None:
    def heartbeat() -> Heartbeat:
        raise KeyError("a bug")

    async with make_server() as server:
        error = await outcome(make_peer(server.address, heartbeat=heartbeat).run())
        assert "task 'heartbeat' failed: KeyError: 'a bug'" in str(error)


@pytest.mark.scenario("PL-06")
async def test_a_bug_in_a_callback_reaches_whoever_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    async with make_server() as server, serving(make_peer(server.address)):
        await all_joined(server, 1)
        monkeypatch.setattr(server, "_understand", fail)
        with pytest.raises(KeyError, match="a bug"):
            await next_one(server, PeerLost)


# limits that must not be there, and those that must


@pytest.mark.scenario("HT-01")
async def test_nothing_but_the_queue_bounds_how_many_are_asked_at_once() -> None:
    in_flight, all_there = itertools.count(1), asyncio.Event()

    async def handle(order: Order) -> Answer:
        if next(in_flight) == 512:
            all_there.set()
        await all_there.wait()
        return Answer(order.number)

    async with make_server() as server, serving(make_peer(server.address, handle)):
        await all_joined(server, 1)
        async with asyncio.TaskGroup() as group:
            asks = [group.create_task(call(server, W0, number)) for number in range(512)]
        assert [task.result().number for task in asks] == list(range(512))


@pytest.mark.scenario("HT-02")
async def test_an_answer_within_a_long_deadline_is_taken_and_asked_for_once() -> None:
    clock, asked, may_answer = ManualClock(), [], asyncio.Event()

    async def handle(order: Order) -> Answer:
        asked.append(order.number)
        await may_answer.wait()
        return Answer(order.number)

    async with (
        make_server(clock=clock, keepalive_period_s=5.0) as server,
        serving(make_peer(server.address, handle)),
        asyncio.TaskGroup() as group,
    ):
        await all_joined(server, 1)
        asking = group.create_task(call(server, W0, 1, deadline_s=900.0))
        await until(lambda: asked == [1])
        clock.advance(899.0)
        await asyncio.sleep(0)
        assert not asking.done()
        may_answer.set()
        assert await asking == Answer(1)
        assert asked == [1]
        may_answer.clear()
        asking_again = group.create_task(outcome_of_timeout(call(server, W0, 2, deadline_s=900.0)))
        await until(lambda: asked == [1, 2])
        clock.advance(900.0)
        assert await asking_again == f"{W0} did not answer Order within 900 s"


async def outcome_of_timeout(asking: Awaitable[object]) -> str:
    try:
        await asking
    except TimeoutError as error:
        return str(error)
    return "no timeout"


@pytest.mark.scenario("MB-04")
async def test_an_answer_that_is_there_already_beats_a_deadline_that_passed_asleep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    async with make_server(clock=clock) as server, asyncio.TaskGroup() as group:
        raw = RawPeer(server.address, "raw")
        await raw.join(Hello("rollout", 0, 1, "here", 1, "run"))
        asking = group.create_task(call(server, W0, 1, deadline_s=5.0))
        envelope = await raw.hear(Kind.ASK)
        raw.say(Kind.REPLY, envelope.op, encode(Answer(1)))
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is held up while the answer reaches the socket
        clock.stall(8.0)
        assert await within(asking) == Answer(1)
        assert "the event loop was held up for 8.0 s" in caplog.text
        raw.close()


@pytest.mark.scenario("MQ-06")
async def test_a_large_message_passes_or_is_refused_by_name_and_blocks_nobody() -> None:
    async with make_server() as server, serving(make_peer(server.address), make_peer(server.address, slot=1)):
        await all_joined(server, 2)
        near = Order(1, bytes((1 << 20) - 100))
        reply = await within(server.call(W0, near, deadline_s=LIMIT_S, reply_type=Answer))
        assert len(reply.payload) == (1 << 20) - 100
        for size in (1 << 20, 150 << 20):
            with pytest.raises(FrameTooLargeError, match=r"Order of \d+ bytes .*max_frame_bytes = 1048576"):
                server.notify(W0, Order(2, bytes(size)))
        assert await call(server, W1, 3) == Answer(3)


@pytest.mark.scenario("MQ-06")
async def test_an_answer_that_does_not_fit_is_an_error_for_its_asker_alone() -> None:
    async def handle(order: Order) -> Answer:
        return Answer(order.number, bytes(order.number))

    async with make_server() as server, serving(make_peer(server.address, handle)):
        await all_joined(server, 1)
        with pytest.raises(RemoteError, match=r"FrameTooLargeError: Answer of .*max_frame_bytes = 1048576"):
            await call(server, W0, 2 << 20)
        assert (await call(server, W0, 5)).number == 5


@pytest.mark.scenario("MQ-06")
async def test_a_frame_far_over_the_limit_is_never_read_and_blocks_nobody() -> None:
    async with make_server(max_frame_bytes=1 << 16) as server, serving(make_peer(server.address)):
        await all_joined(server, 1)
        rogue = RawPeer(server.address, "rogue")
        rogue.send(bytes(8 << 20))
        for number in range(20):
            assert (await call(server, W0, number)).number == number
        rogue.close()
        assert server.peers() == (W0,)
