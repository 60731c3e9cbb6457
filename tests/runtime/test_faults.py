"""Back-pressure, lost and late frames, partitions, gpu_table: with faults as an API and with real processes."""

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rpc_messages import (
    LIMIT_S,
    Answer,
    Order,
    RawPeer,
    all_joined,
    make_peer,
    make_server,
    next_one,
    next_order,
    serving,
    until,
    within,
)

from pearl.runtime.errors import QueueFullError
from pearl.runtime.inbound import PeerLost
from pearl.runtime.rpc_client import COORDINATOR
from pearl.runtime.rpc_server import RpcServer
from pearl.types.messages.control import Hello

W0, W1 = "rollout.0.1", "rollout.1.1"
HERE = Path(__file__).parent


async def count(server: RpcServer, peer: str = W0) -> int:
    """How many orders it was told, -1 when one is missing."""
    return (await within(server.call(peer, Order(-1), deadline_s=LIMIT_S, reply_type=Answer))).number


async def fill(server: RpcServer) -> int:
    """Tell W0 numbered orders of 32 KiB until it takes no more; returns how many were accepted."""
    for number in itertools.count():
        try:
            server.notify(W0, Order(number, bytes(1 << 15)))
        except QueueFullError:
            return number
        await asyncio.sleep(0)
    raise AssertionError


@pytest.mark.scenario("MQ-01")
async def test_a_peer_that_does_not_read_gives_an_error_and_later_has_no_hole() -> None:
    heard: list[int] = []
    may_read = asyncio.Event()

    async def handle(order: Order) -> None:
        await may_read.wait()
        heard.append(order.number)

    async with make_server(queue_messages=64) as server:
        slow, other = make_peer(server.address, handle, queue_messages=64), make_peer(server.address, slot=1)
        async with serving(slow, other):
            await all_joined(server, 2)
            sent = await fill(server)
            with pytest.raises(QueueFullError, match=r"does not take .*: runtime\.queue_messages = 64"):
                server.notify(W0, Order(sent))
            assert await within(server.call(W1, Order(7), deadline_s=LIMIT_S, reply_type=Answer)) == Answer(7)
            may_read.set()
            await until(lambda: len(heard) == sent)
            assert heard == list(range(sent))


@pytest.mark.scenario("MQ-01")
async def test_a_coordinator_that_does_not_receive_makes_its_peers_wait() -> None:
    async with make_server(queue_messages=32) as server:
        peer = make_peer(server.address, queue_messages=32)
        async with serving(peer), asyncio.TaskGroup() as group:
            told = 0

            async def tell_all() -> None:
                nonlocal told
                for number in range(2000):
                    await peer.notify(Order(number, bytes(1 << 15)))
                    told += 1

            telling = group.create_task(tell_all())
            await until(lambda: told > 32 and server.paused_s > 0.1)
            assert told < 2000
            assert [(await next_order(server)).number for _ in range(2000)] == list(range(2000))
            await within(telling)


@pytest.mark.scenario("MQ-04")
async def test_the_end_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    async with make_server(queue_messages=64) as server:
        raw = RawPeer(server.address, "raw")
        await raw.join(Hello("rollout", 0, 1, "here", 1, "run"))
        await fill(server)
        began = time.monotonic()
    assert time.monotonic() - began < 2.0
    raw.close()


@asynccontextmanager
async def echo_process(server: RpcServer, incarnation: int = 1) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "echo_peer.py"),
        server.address,
        str(incarnation),
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.scenario("MQ-01")
async def test_a_stopped_process_goes_on_without_a_hole() -> None:
    async with make_server(queue_messages=64) as server, echo_process(server) as process:
        await all_joined(server, 1)
        process.send_signal(signal.SIGSTOP)
        sent = await fill(server)
        process.send_signal(signal.SIGCONT)
        await until_room(server)
        while True:
            told = await count(server)
            assert told >= 0
            if told == sent:
                break


async def until_room(server: RpcServer) -> None:
    """The peer takes messages again."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await count(server)
                return
            except QueueFullError:
                await asyncio.sleep(0.001)


@pytest.mark.scenario("MB-05")
async def test_after_kill_9_the_next_incarnation_serves() -> None:
    async with make_server() as server:
        async with echo_process(server) as process:
            await all_joined(server, 1)
            process.kill()
            await process.wait()
            server.drop(W0, "killed")
        async with echo_process(server, incarnation=2):
            assert await all_joined(server, 1) == ["rollout.0.2"]
            server.notify("rollout.0.2", Order(0))
            assert await count(server, "rollout.0.2") == 1


async def test_a_frame_lost_on_its_way_to_the_coordinator_ends_that_peer_alone() -> None:
    async with make_server() as server:
        peers = make_peer(server.address), make_peer(server.address, slot=1)
        async with serving(*peers) as [running, _]:
            await all_joined(server, 2)
            server.faults.drop(W0, "in", 1)
            await peers[0].notify(Order(1))
            lost = await next_one(server, PeerLost)
            assert lost.peer == W0
            assert "some were lost" in lost.reason
            assert (server.faults.dropped, server.counters.lost_peers, server.peers()) == (1, 1, (W1,))
            assert (await within(running)).startswith("dropped by the coordinator: frame")


async def test_a_frame_lost_on_its_way_to_a_peer_ends_that_peer() -> None:
    async with make_server() as server, serving(make_peer(server.address)) as [running]:
        await all_joined(server, 1)
        server.faults.drop(W0, "out", 1)
        server.notify(W0, Order(1))
        assert "some were lost" in await within(running)


async def test_delayed_frames_come_late_and_in_order() -> None:
    async with make_server() as server:
        peer = make_peer(server.address)
        async with serving(peer):
            await all_joined(server, 1)
            server.faults.delay(W0, 0.05)
            began = time.monotonic()
            for number in range(20):
                await peer.notify(Order(number))
            assert [(await next_order(server)).number for _ in range(20)] == list(range(20))
            assert time.monotonic() - began >= 0.05


@pytest.mark.scenario("MB-05")
async def test_a_partition_that_heals_in_time_loses_nothing() -> None:
    heard: list[int] = []

    async def handle(order: Order) -> None:
        heard.append(order.number)

    async with make_server() as server:
        peer = make_peer(server.address, handle)
        async with serving(peer):
            await all_joined(server, 1)
            server.faults.partition(W0)
            last = server.last_heard(W0)
            for number in range(20):
                server.notify(W0, Order(number))
                await peer.notify(Order(number))
            await asyncio.sleep(0.1)
            assert (heard, server.last_heard(W0)) == ([], last)
            server.faults.heal(W0)
            assert [(await next_order(server)).number for _ in range(20)] == list(range(20))
            await until(lambda: heard == list(range(20)))


@pytest.mark.parametrize("side", ["server", "peer"])
async def test_a_partition_that_lasts_ends_the_lease(side: str) -> None:
    async with make_server() as server:
        peer = make_peer(server.address, lease_s=0.3)
        async with serving(peer) as [running]:
            await all_joined(server, 1)
            if side == "server":
                server.faults.partition(W0)
            else:
                peer.faults.partition(COORDINATOR)
            assert (await within(running)).startswith("lease lost: the coordinator was silent for 0.")


@pytest.mark.scenario("MB-04")
async def test_a_peer_that_was_asleep_itself_keeps_its_lease() -> None:
    async with make_server() as server, serving(make_peer(server.address, lease_s=0.3)) as [running]:
        await all_joined(server, 1)
        for _ in range(3):
            time.sleep(0.6)  # noqa: ASYNC251 - server and peer both
            await asyncio.sleep(0.1)
        assert not running.done()
        assert await within(server.call(W0, Order(1), deadline_s=LIMIT_S, reply_type=Answer)) == Answer(1)


async def test_nobody_there_ends_the_lease_too() -> None:
    async with make_server() as server:
        address = server.address
    assert (await within(make_peer(address, lease_s=0.3).run())).startswith("lease lost")
