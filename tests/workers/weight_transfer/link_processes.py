"""Receivers and sources in processes of their own, for the scenario tests; and weights to send."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psutil
import torch

from pearl.types.weights import BucketSpec, Snapshot, Version
from pearl.workers.weight_transfer.checksum import weights_checksum
from pearl.workers.weight_transfer.errors import TransferError
from pearl.workers.weight_transfer.receiver import FetchAttempt, Received, Receiver, Transport
from pearl.workers.weight_transfer.sender import LinkServer
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

CONTEXT = multiprocessing.get_context("forkserver")
# torch is imported once, before the server has any thread: a process then starts in milliseconds.
CONTEXT.set_forkserver_preload(
    ["pearl.workers.weight_transfer.receiver", "pearl.workers.weight_transfer.sender"]
)
ANSWER_TIMEOUT_S = 30.0
BUCKET_BYTES = 1 << 16


def weights(seed: int, num_buckets: int = 10) -> list[tuple[str, torch.Tensor]]:
    """``num_buckets`` buckets of 64 KiB in five tensors of odd sizes, one of them not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    total = num_buckets * BUCKET_BYTES // 4 - 64
    sizes = [total // 7, total // 3 + 5, 1, 33]
    sizes.append(total - sum(sizes) - 64)
    tensors = [(f"layer.{i}", torch.randn(size, generator=generator)) for i, size in enumerate(sizes)]
    return [*tensors, ("transposed", torch.randn(4, 8, generator=generator).t())]


def received_checksum(received: Received) -> str:
    image = b"".join(bytes(data) for _, data in received)
    return weights_checksum(
        (spec.name, spec.dtype, spec.shape, image[spec.offset : spec.offset + spec.num_bytes])
        for spec in received.snapshot.tensors
    )


class Answer(msgspec.Struct, frozen=True):
    checksum: str  # "" when nothing arrived whole
    error: str  # type and text of the TransferError
    link: int  # identity of the link object that is up, 0 = none
    seconds: float


@contextlib.contextmanager
def fault(name: str, at: int) -> Iterator[None]:
    """Do ``name`` when bucket ``at`` has arrived: kill, stop, refuse; or slow at every bucket."""
    original = FetchAttempt.verify
    count = 0

    def verify(self: FetchAttempt, bucket: BucketSpec, data: memoryview) -> None:
        nonlocal count
        if name == "slow":
            time.sleep(0.1)  # the slowness under test
        elif count == at:
            act(name, data)
        count += 1
        original(self, bucket, data)

    FetchAttempt.verify = verify  # type: ignore[method-assign]
    try:
        yield
    finally:
        FetchAttempt.verify = original  # type: ignore[method-assign]


def act(name: str, data: memoryview) -> None:
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif name == "refuse":
        data[0] ^= 1


def serve_receiver(pipe: Connection, slot: int, incarnation: int) -> None:
    receiver = Receiver(slot, incarnation)
    while True:
        snapshot, transport, deadline_s, fault_name, fault_at = pipe.recv()
        start = time.monotonic()
        checksum = error = ""
        try:
            with (
                fault(fault_name, fault_at),
                receiver.receive(snapshot, transport=transport, deadline_s=deadline_s) as received,
            ):
                checksum = received_checksum(received)
        except TransferError as failure:
            error = f"{type(failure).__name__}: {failure}"
        link = next(map(id, receiver.links().values()), 0)
        pipe.send(Answer(checksum, error, link, time.monotonic() - start))


def serve_source(pipe: Connection, incarnation: int) -> None:
    store = SnapshotStore(incarnation, 0, "here", BUCKET_BYTES)
    server = LinkServer(store, address="127.0.0.1", deadline_s=2.0)
    while True:
        seed = pipe.recv()
        pipe.send(store.publish(Version(incarnation, seed), weights(seed)))
        assert not pipe.closed
        del seed
        assert server.address


class Process:
    """A child with a pipe; killed with the test."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=target, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def answer(self) -> Any:
        assert self.pipe.poll(ANSWER_TIMEOUT_S), "the process did not answer"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()  # ends a stopped process too
        self.process.join(ANSWER_TIMEOUT_S)
        self.pipe.close()


class ReceiverProcess(Process):
    def __init__(self, slot: int, incarnation: int = 1) -> None:
        super().__init__(serve_receiver, slot, incarnation)

    def start(
        self,
        snapshot: Snapshot,
        transport: Transport = "link",
        deadline_s: float = 2.0,
        fault: str = "",
        at: int = 0,
    ) -> None:
        self.pipe.send((snapshot, transport, deadline_s, fault, at))

    def wait_until_stopped(self) -> None:
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < end, "the process did not stop"
            time.sleep(0.005)

    def answer(self) -> Answer:
        answer = super().answer()
        assert isinstance(answer, Answer)
        return answer


class SourceProcess(Process):
    def __init__(self, incarnation: int) -> None:
        super().__init__(serve_source, incarnation)

    def publish(self, seed: int) -> Snapshot:
        self.pipe.send(seed)
        snapshot = self.answer()
        assert isinstance(snapshot, Snapshot)
        return snapshot
