"""Pushes over links between real processes on loopback; each receiver is a process of its own."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from link_processes import BUCKET_BYTES, Answer, ReceiverProcess, SourceProcess, received_checksum, weights

from pearl.types.weights import BucketSpec, Snapshot, Version
from pearl.workers.weight_transfer.channel import Channel, LinkKey, Open, Refused
from pearl.workers.weight_transfer.errors import (
    CorruptBucketError,
    SourceGoneError,
    SupersededError,
    TransferError,
)
from pearl.workers.weight_transfer.receiver import FetchAttempt, Receiver
from pearl.workers.weight_transfer.sender import LinkServer, PushOutcome
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

DEADLINE_S = 1.0
SLACK_S = 2.0
"""What a loaded machine may add to a limit."""


class Source:
    def __init__(self, incarnation: int = 1) -> None:
        self.store = SnapshotStore(incarnation, 0, "here", BUCKET_BYTES)
        self.server = LinkServer(
            self.store, bind_address="127.0.0.1", address="127.0.0.1", deadline_s=2 * DEADLINE_S
        )

    def publish(self, step: int) -> Snapshot:
        return self.store.publish(Version(0, step), weights(step))

    def outcome(self, slot: int, step: int) -> PushOutcome:
        """How the push ended; waits for it."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for outcome in self.server.outcomes():
                if (outcome.key.slot, outcome.version.step) == (slot, step):
                    return outcome
            time.sleep(0.01)
        raise AssertionError(f"the push of {step} to slot {slot} did not end")


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.server.close()
    source.store.close()


@pytest.fixture
def start_receiver() -> Iterator[Callable[[int], ReceiverProcess]]:
    with contextlib.ExitStack() as stack:

        def start(slot: int) -> ReceiverProcess:
            process = ReceiverProcess(slot)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def local_receiver() -> Iterator[Receiver]:
    receiver = Receiver(7, 1)
    yield receiver
    receiver.close()


def push(snapshot: Snapshot, receivers: list[ReceiverProcess]) -> list[Answer]:
    for receiver in receivers:
        receiver.start(snapshot)
    return [receiver.answer() for receiver in receivers]


@pytest.mark.scenario("WS-02")
def test_a_slow_receiver_costs_time_only(
    source: Source, start_receiver: Callable[[int], ReceiverProcess]
) -> None:
    slow, quick = start_receiver(1), start_receiver(2)
    snapshot = source.publish(1)
    slow.start(snapshot, fault="slow")
    quick.start(snapshot)
    assert quick.answer().checksum == snapshot.checksum
    answer = slow.answer()
    assert answer.checksum == snapshot.checksum
    assert source.outcome(2, 1).seconds < source.outcome(1, 1).seconds
    assert source.outcome(1, 1).error == ""


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.scenario("WS-04")
def test_a_receiver_lost_after_bucket_3_of_10_hurts_only_itself(
    source: Source, start_receiver: Callable[[int], ReceiverProcess], fault: str
) -> None:
    lost, *others = (start_receiver(slot) for slot in range(4))
    first = source.publish(1)
    before = push(first, [lost, *others])
    links = source.server.links()
    second = source.publish(2)
    lost.start(second, fault=fault, at=3, deadline_s=DEADLINE_S)
    answers = push(second, others)
    assert [answer.checksum for answer in answers] == [second.checksum] * 3
    outcome = source.outcome(0, 2)
    assert outcome.error
    assert outcome.seconds < DEADLINE_S + SLACK_S
    third = source.publish(3)
    answers = push(third, others)
    assert [answer.checksum for answer in answers] == [third.checksum] * 3
    # Nobody else's link was touched, at either end.
    assert [answer.link for answer in answers] == [answer.link for answer in before[1:]]
    del links[LinkKey(0, 1, 0, 1)]
    current = source.server.links()
    assert all(current[key] is link for key, link in links.items())
    if fault == "stop":
        check_it_recovers(source, lost)


def check_it_recovers(source: Source, lost: ReceiverProcess) -> None:
    assert lost.process.pid is not None
    os.kill(lost.process.pid, signal.SIGCONT)
    late = lost.answer()
    assert not late.checksum
    assert late.error
    assert source.store.latest is not None
    assert push(source.store.latest, [lost])[0].checksum == source.store.latest.checksum


@pytest.mark.scenario("WS-05")
def test_a_refused_bucket_is_named_and_the_next_push_heals(
    source: Source, start_receiver: Callable[[int], ReceiverProcess]
) -> None:
    receiver = start_receiver(1)
    snapshot = source.publish(1)
    receiver.start(snapshot, fault="refuse", at=4)
    answer = receiver.answer()
    assert not answer.checksum
    assert "CorruptBucketError: bucket 4 of 10 of version 0:1 is corrupt" in answer.error
    assert "layer." in answer.error
    outcome = source.outcome(1, 1)
    assert "bucket 4 of 10" in outcome.error
    assert (outcome.key.slot, outcome.key.incarnation) == (1, 1)
    assert push(source.publish(2), [receiver])[0].checksum == source.store.latest.checksum  # type: ignore[union-attr]


@pytest.mark.scenario("WS-06")
def test_a_late_joiner_proves_the_version_by_hash(
    source: Source, start_receiver: Callable[[int], ReceiverProcess]
) -> None:
    joiner = start_receiver(1)
    seventh = source.publish(7)
    joiner.start(seventh, fault="slow")
    eighth = source.publish(8)
    first = joiner.answer()
    # Either the whole old version or the clean news of the newer one; then it catches up and proves it.
    assert first.checksum == seventh.checksum or "SupersededError" in first.error
    assert push(eighth, [joiner])[0].checksum == eighth.checksum != seventh.checksum


@pytest.mark.scenario("WS-10")
def test_receivers_stay_while_the_source_restarts_three_times(local_receiver: Receiver) -> None:
    prefixes = set()
    for incarnation in (1, 2, 3, 4):
        source = SourceProcess(incarnation)
        snapshot = source.publish(incarnation)
        with local_receiver.receive(snapshot, transport="link", deadline_s=2.0) as received:
            assert received_checksum(received) == snapshot.checksum
        assert [key.source_incarnation for key in local_receiver.links()] == [incarnation]
        prefixes.add(snapshot.sources[0].link_address)
        source.kill()
        host, _, port = snapshot.sources[0].link_address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):  # the port went with the process
            socket.create_connection((host, int(port)), timeout=1)
    local_receiver.close()
    local_receiver.close()


@pytest.mark.scenario("WS-10")
def test_a_source_killed_while_a_link_is_made_costs_at_most_the_deadline(
    local_receiver: Receiver,
) -> None:
    source = SourceProcess(1)
    snapshot = source.publish(1)
    os.kill(source.process.pid or 0, signal.SIGSTOP)  # it accepts connections and never answers
    killer = threading.Timer(0.2, source.kill)
    killer.start()
    start = time.monotonic()
    with pytest.raises(SourceGoneError, match="cannot be had"):
        local_receiver.receive(snapshot, transport="link", deadline_s=DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    killer.join()
    restarted = SourceProcess(2)
    try:
        local_receiver.receive(restarted.publish(1), transport="link", deadline_s=2.0).close()
    finally:
        restarted.kill()


@pytest.mark.parametrize("transport", ["mapped", "link"])
@pytest.mark.scenario("WS-12")
def test_the_bucket_size_does_not_change_what_arrives(transport: str) -> None:
    tensors = weights(5, num_buckets=40)  # 2.6 MB
    checksums = set()
    for bucket_bytes in (1 << 20, 64 << 20, 1 << 30, 64 << 10):
        store = SnapshotStore(1, 0, "here", bucket_bytes)
        server = LinkServer(store, address="127.0.0.1")
        snapshot = store.publish(Version(0, 1), tensors)
        receiver = Receiver(1, 1)
        with receiver.receive(snapshot, transport=transport, deadline_s=5.0) as received:  # type: ignore[arg-type]
            checksums |= {received_checksum(received), snapshot.checksum}
        receiver.close()
        server.close()
        store.close()
    assert len(checksums) == 1


@pytest.mark.parametrize("bind_address", ["::1", "::"])
def test_weights_travel_over_ipv6(bind_address: str, local_receiver: Receiver) -> None:
    with contextlib.closing(SnapshotStore(1, 0, "here", BUCKET_BYTES)) as store:
        server = LinkServer(store, bind_address=bind_address, address="::1", deadline_s=2 * DEADLINE_S)
        with contextlib.closing(server):
            assert server.address.startswith("[::1]:")
            snapshot = store.publish(Version(0, 1), weights(1))
            with local_receiver.receive(snapshot, transport="link", deadline_s=5.0) as received:
                assert received_checksum(received) == snapshot.checksum


def test_joining_and_leaving_does_not_touch_the_links_of_others(
    source: Source, start_receiver: Callable[[int], ReceiverProcess]
) -> None:
    stays, leaves = start_receiver(1), start_receiver(2)
    before = push(source.publish(1), [stays, leaves])[0]
    link = source.server.links()[LinkKey(0, 1, 1, 1)]
    joins = start_receiver(3)
    assert push(source.publish(2), [stays, joins])[0].link == before.link
    leaves.kill()
    assert push(source.publish(3), [stays, joins])[0].link == before.link
    assert source.server.links()[LinkKey(0, 1, 1, 1)] is link
    assert {key.slot for key in source.server.links()} == {1, 3}


def test_links_leave_nothing_in_the_store(source: Source, local_receiver: Receiver) -> None:
    for step in range(3):
        local_receiver.receive(source.publish(step), transport="link", deadline_s=2.0).close()
        source.outcome(7, step)
        local_receiver.close()
    assert source.server.store_keys() == []


def test_a_newer_version_supersedes_at_a_bucket_edge_and_the_link_stays(
    source: Source, local_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = source.publish(1)
    local_receiver.receive(first, transport="link", deadline_s=2.0)
    link = local_receiver.links()
    second = source.publish(2)
    seen: list[int] = []
    verify = FetchAttempt.verify

    def publish_at_the_third(attempt: FetchAttempt, bucket: BucketSpec, data: memoryview) -> None:
        verify(attempt, bucket, data)
        seen.append(bucket.offset)
        if len(seen) == 3:
            source.publish(3)

    monkeypatch.setattr(FetchAttempt, "verify", publish_at_the_third)
    with pytest.raises(SupersededError, match=r"0:2 was superseded by 0:3 before bucket [3-6]"):
        local_receiver.receive(second, transport="link", deadline_s=2.0)
    monkeypatch.undo()
    assert source.outcome(7, 2).error == "superseded by 0:3"
    third = source.store.latest
    assert third is not None
    with local_receiver.receive(third, transport="link", deadline_s=2.0) as received:
        assert received_checksum(received) == third.checksum
    assert local_receiver.links() == link


@pytest.mark.parametrize("transport", ["mapped", "link"])
def test_a_corrupt_bucket_is_detected(source: Source, local_receiver: Receiver, transport: str) -> None:
    snapshot = source.publish(1)
    with source.store.pinned(snapshot.version) as image:
        assert image is not None
        image[snapshot.buckets[6].offset + 5] ^= 1
    with pytest.raises(CorruptBucketError, match="bucket 6 of 10") as caught:
        local_receiver.receive(snapshot, transport=transport, deadline_s=2.0)  # type: ignore[arg-type]
    assert caught.value.index == 6


def test_auto_maps_on_the_own_host_and_links_elsewhere(source: Source) -> None:
    snapshot = source.publish(1)
    for host, transport in (("here", "mapped"), ("elsewhere", "link"), (None, "mapped")):
        receiver = Receiver(1, 1, host)
        with receiver.receive(snapshot, deadline_s=2.0) as received:
            assert received.transport == transport
            assert received_checksum(received) == snapshot.checksum
        receiver.close()


def test_another_source_is_used_when_one_is_gone(source: Source, local_receiver: Receiver) -> None:
    snapshot = source.publish(1)
    good = snapshot.sources[0]
    gone = type(good)(1, 1, "there", "/proc/0/fd/0", "127.0.0.1:1")
    both = Snapshot(
        snapshot.version,
        snapshot.num_bytes,
        snapshot.tensors,
        snapshot.buckets,
        (good, gone),  # slot 7 starts with the second
        snapshot.checksum,
    )
    with local_receiver.receive(both, transport="link", deadline_s=2.0) as received:
        assert received_checksum(received) == snapshot.checksum


def test_an_older_incarnation_of_a_slot_is_refused(source: Source) -> None:
    snapshot = source.publish(1)
    newer, older = Receiver(1, 2), Receiver(1, 1)
    newer.receive(snapshot, transport="link", deadline_s=2.0)
    with pytest.raises(SourceGoneError, match="incarnation 2 by now"):
        older.receive(snapshot, transport="link", deadline_s=2.0)
    assert [key.incarnation for key in source.server.links()] == [2]
    newer.close()


def test_a_link_to_another_incarnation_of_the_source_is_refused(source: Source) -> None:
    host, _, port = source.server.address.rpartition(":")
    channel = Channel(socket.create_connection((host, int(port)), timeout=2))
    channel.send(Open(LinkKey(0, 9, 1, 1)))
    answer = channel.recv(2.0)
    assert isinstance(answer, Refused)
    assert "source 0.1" in answer.reason
    channel.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1"])
def test_garbage_on_the_port_ends_only_its_connection(
    source: Source, local_receiver: Receiver, garbage: bytes
) -> None:
    host, _, port = source.server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=2) as connection:
        connection.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    local_receiver.receive(source.publish(1), transport="link", deadline_s=2.0).close()


def test_the_publisher_never_waits_for_a_stopped_receiver(
    source: Source, start_receiver: Callable[[int], ReceiverProcess]
) -> None:
    stopped = start_receiver(1)
    stopped.start(source.publish(1), fault="stop", at=2, deadline_s=DEADLINE_S)
    stopped.wait_until_stopped()
    for step in range(2, 8):
        start = time.monotonic()
        source.publish(step)
        assert time.monotonic() - start < DEADLINE_S / 2
    assert source.outcome(1, 1).seconds < DEADLINE_S + SLACK_S


async def test_receiving_on_an_event_loop_does_not_block_it(source: Source, local_receiver: Receiver) -> None:
    received = await local_receiver.receive_async(source.publish(1), transport="link", deadline_s=2.0)
    assert received.transport == "link"


def test_a_cancelled_receive_ends_at_the_next_bucket(source: Source, local_receiver: Receiver) -> None:
    cancel = threading.Event()
    cancel.set()
    snapshot = source.publish(1)
    for transport in ("mapped", "link"):
        with pytest.raises(TransferError, match="cancelled"):
            local_receiver.receive(snapshot, transport=transport, deadline_s=2.0, cancel=cancel)


def test_the_bytes_are_usable_as_tensors_without_a_copy(source: Source, local_receiver: Receiver) -> None:
    snapshot = source.publish(1)
    with local_receiver.receive(snapshot, transport="link", deadline_s=2.0) as received:
        bucket, data = next(iter(received))
        assert torch.frombuffer(data, dtype=torch.uint8).numel() == bucket.num_bytes
