"""Who may say what, and how much of it: checked by the sender's kind and size before it costs anything."""

import pytest
from rpc_messages import RUN_ID, RawPeer, all_joined, make_server, next_one, until

from pearl.runtime.codec import Kind, Readers, encode
from pearl.runtime.errors import MalformedError
from pearl.runtime.inbound import Call, Notification, PeerJoined, PeerLost
from pearl.runtime.peer_table import MAX_ADMINS, PeerEntry, PeerTable
from pearl.runtime.zmq_socket import Outbox
from pearl.types.messages.control import (
    MAX_HOST_GPUS,
    Ack,
    AgentReport,
    Gpu,
    GroupExited,
    Heartbeat,
    Hello,
    Notice,
    Preempt,
    StatusRequest,
)
from pearl.types.messages.rollout import Deltas
from pearl.types.messages.senders import SENDERS

ADMIN = Hello("admin", 7, 1, "here", 1, RUN_ID)
ROLLOUT = Hello("rollout", 0, 1, "here", 1, RUN_ID)
FRAME_BYTES = 1 << 20


def report(num_gpus: int) -> AgentReport:
    return AgentReport("h", tuple(Gpu(f"h/{i}", 1, True) for i in range(num_gpus)), 1, "spot")


async def test_an_admin_that_sends_tokens_is_not_heard_and_hurts_nobody() -> None:
    async with make_server(messages=SENDERS, max_frame_bytes=FRAME_BYTES) as server:
        admin, rollout = RawPeer(server.address, "a"), RawPeer(server.address, "r")
        try:
            await admin.join(ADMIN)
            await rollout.join(ROLLOUT)
            await all_joined(server, 2)
            for message in (Deltas(0, ()), GroupExited("rollout.0.1", 0, "", ""), Notice(0.0, "")):
                admin.say(Kind.TELL, 0, encode(message))
            await until(lambda: server.counters.malformed == 3)
            rollout.say(Kind.TELL, 0, encode(Deltas(0, ())))
            told = await next_one(server, Notification)
            assert (told.peer, told.message) == ("rollout.0.1", Deltas(0, ()))
            admin.say(Kind.ASK, 5, encode(StatusRequest()))
            assert (await next_one(server, Call)).peer == "admin.7.1"
        finally:
            admin.close()
            rollout.close()


async def test_a_frame_beyond_what_its_sender_ever_sends_ends_that_sender() -> None:
    async with make_server(messages=SENDERS, max_frame_bytes=16 << 20) as server:
        admin = RawPeer(server.address, "a")
        try:
            await admin.join(ADMIN)
            await next_one(server, PeerJoined)
            admin.say(Kind.TELL, 0, encode(b"x" * (5 << 20)))
            lost = await next_one(server, PeerLost)
            assert lost.peer == "admin.7.1"
            assert "more than" in lost.reason
        finally:
            admin.close()


async def test_who_has_not_said_hello_is_read_only_if_it_can_be_one() -> None:
    async with make_server(messages=SENDERS, max_frame_bytes=16 << 20) as server:
        stranger = RawPeer(server.address, "s")
        try:
            stranger.say(Kind.ASK, 1, encode(Hello("admin", 1, 1, "h" * 100_000, 1, RUN_ID)))
            stranger.say(Kind.ASK, 1, encode(Hello("admin", 1, 1, "h" * 1000, 1, RUN_ID)))
            stranger.say(Kind.ASK, 1, encode(Hello("admin", -1, 1, "h", 1, RUN_ID)))
            stranger.say(Kind.ASK, 1, encode(StatusRequest()))
            await until(lambda: server.counters.malformed == 4)
            assert server.peers() == ()
        finally:
            stranger.close()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("agent", report(MAX_HOST_GPUS + 1)),
        ("agent", report(100_000)),
        ("agent", Notice(float("nan"), "")),
        ("agent", Notice(-1.0, "")),
        ("agent", StatusRequest()),
        ("admin", Preempt("arrive", (), 1 << 40)),
        ("admin", Preempt("reclaim", (), 1, float("inf"))),
        ("admin", report(1)),
        ("training", Deltas(0, ())),
        ("environment", Preempt("arrive", (), 1)),
        ("rollout", report(1)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_message_out_of_its_bounds_or_of_another_kind_is_malformed(kind: str, message: object) -> None:
    reader = Readers(SENDERS, Hello | Ack, 64 << 20).of(kind)
    envelope = reader.envelope(encode((0, int(Kind.TELL), 0, message)))
    with pytest.raises(MalformedError):
        reader.body(envelope)


@pytest.mark.parametrize("kind", ["agent", "rollout", "training", "environment", "admin"])
def test_every_kind_of_peer_may_beat(kind: str) -> None:
    reader = Readers(SENDERS, Hello | Ack, FRAME_BYTES).of(kind)
    assert reader.body(reader.envelope(encode((0, int(Kind.TELL), 0, Heartbeat(1))))) == Heartbeat(1)


def join(members: PeerTable, hello: Hello) -> None:
    name = f"{hello.kind}.{hello.slot}.{hello.incarnation}"
    members.add(PeerEntry(name, name.encode(), hello, Outbox(name, lambda frame: True, 1), 0.0, 0))


def test_admins_are_bounded_and_leave_nothing_behind() -> None:
    members = PeerTable(RUN_ID)
    for slot in range(MAX_ADMINS):
        hello = Hello("admin", slot, 1, "h", 1, "")
        assert members.objection(hello) == ""
        join(members, hello)
    assert "64 peers of kind admin are connected" in members.objection(Hello("admin", 999, 1, "h", 1, RUN_ID))
    assert members.objection(ROLLOUT) == ""
    members.remove("admin.0.1")
    assert members.objection(Hello("admin", 999, 1, "h", 1, RUN_ID)) == ""
    assert not members._newest


def test_only_who_knows_the_run_can_be_the_coordinators_own_agent() -> None:
    members = PeerTable(RUN_ID)
    assert "belongs to run ''" in members.objection(Hello("agent", 0, 1, "h", 1, ""))
    assert members.objection(Hello("agent", 0, 1, "h", 1, RUN_ID)) == ""
    assert members.objection(Hello("agent", 5, 1, "h", 1, "")) == ""
