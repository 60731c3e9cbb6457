"""How long a weight push takes against what memory allows.

One source publishes a model image; worker processes on this host take it, over the mapped image and over gloo
links. The floor is what no transport can avoid: as many concurrent copies of the image, one in each of the same
processes, plus one xxh3-128 over each copy. Rounds are interleaved, so that a noisy machine is noisy for all.

A push ends when every worker holds a verified copy in memory of its own. PASS when the mapped push, hashing
included, takes at most twice the floor (median over the rounds); exit code 1 when it does not.

    python benchmarks/weight_push.py [--mib 256] [--workers 4] [--rounds 7]
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import xxhash

from pearl.types.weights import Snapshot, Version
from pearl.workers.weight_transfer.receiver import Receiver, Transport
from pearl.workers.weight_transfer.sender import LinkServer
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

MAX_RATIO = 2.0
NUM_TENSORS = 64
BUCKET_BYTES = 4 << 20
ANSWER_TIMEOUT_S = 120.0
CONTEXT = multiprocessing.get_context("spawn")


def worker(pipe: Connection, slot: int, num_bytes: int) -> None:
    """Does what it is asked with memory of its own, all of it touched before."""
    torch.set_num_threads(1)
    receiver = Receiver(slot, 1)
    weights = np.ones(num_bytes, dtype=np.uint8)
    source = np.full(num_bytes, slot, dtype=np.uint8)
    pipe.send("ready")
    while True:
        task: tuple[Snapshot, Transport] | None = pipe.recv()
        if task is None:
            np.copyto(weights, source)
            xxhash.xxh3_128_digest(weights.data)
        else:
            snapshot, transport = task
            take(receiver, snapshot, transport, weights)
        pipe.send("done")


def take(receiver: Receiver, snapshot: Snapshot, transport: Transport, weights: np.ndarray[Any, Any]) -> None:
    with receiver.receive(snapshot, transport=transport, deadline_s=30.0) as received:
        if transport == "mapped":  # a link's bytes are in this process already
            for bucket, data in received:
                weights[bucket.offset : bucket.offset + bucket.num_bytes] = np.frombuffer(
                    data, dtype=np.uint8
                )


class Workers:
    def __init__(self, count: int, num_bytes: int) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for slot in range(count):
            pipe, other = CONTEXT.Pipe()
            process = CONTEXT.Process(target=worker, args=(other, slot, num_bytes), daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)
        self._wait()

    def timed(self, task: tuple[Snapshot, Transport] | None) -> float:
        """Seconds until all have taken the snapshot, or done the floor (None), at the same time."""
        start = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(task)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_TIMEOUT_S):
                raise SystemExit(f"a worker did not answer within {ANSWER_TIMEOUT_S} s")
            pipe.recv()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def measure(mib: int, num_workers: int, num_rounds: int) -> dict[str, list[float]]:
    num_bytes = mib << 20
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (f"layer.{i:02}", torch.randn(num_bytes // 4 // NUM_TENSORS, generator=generator))
        for i in range(NUM_TENSORS)
    ]
    store = SnapshotStore(1, 0, "here", BUCKET_BYTES)
    server = LinkServer(store, bind_address="127.0.0.1", address="127.0.0.1", deadline_s=30.0)
    workers = Workers(num_workers, num_bytes)
    times: dict[str, list[float]] = {name: [] for name in ("floor", "publish", "mapped", "link")}
    try:
        for step in range(num_rounds + 1):
            one_round(times, store, tensors, workers, Version(0, step))
    finally:
        workers.close()
        server.close()
        store.close()
    return {name: values[1:] for name, values in times.items()}  # the first round warms up


def one_round(
    times: dict[str, list[float]],
    store: SnapshotStore,
    tensors: list[tuple[str, torch.Tensor]],
    workers: Workers,
    version: Version,
) -> None:
    times["floor"].append(workers.timed(None))
    start = time.perf_counter()
    snapshot = store.publish(version, tensors)
    times["publish"].append(time.perf_counter() - start)
    times["mapped"].append(workers.timed((snapshot, "mapped")))
    times["floor"].append(workers.timed(None))
    times["link"].append(workers.timed((snapshot, "link")))


def report(times: dict[str, list[float]], mib: int, num_workers: int) -> bool:
    floor = statistics.median(times["floor"])
    rows = {
        **times,
        "publish + mapped": [a + b for a, b in zip(times["publish"], times["mapped"], strict=True)],
    }
    print(f"{mib} MiB to {num_workers} workers on this host; floor = {num_workers} copies + xxh3-128")
    print(f"{'':18} {'median s':>9} {'min s':>9} {'max s':>9} {'x floor':>8}")
    for name, values in rows.items():
        median = statistics.median(values)
        print(f"{name:18} {median:9.3f} {min(values):9.3f} {max(values):9.3f} {median / floor:8.2f}")
    ratio = statistics.median(times["mapped"]) / floor
    verdict = "PASS" if ratio <= MAX_RATIO else "FAIL"
    print(f"{verdict}: mapped push {ratio:.2f} x the floor (at most {MAX_RATIO})")
    return ratio <= MAX_RATIO


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(arguments.mib, arguments.workers, arguments.rounds)
    sys.exit(0 if report(times, arguments.mib, arguments.workers) else 1)


if __name__ == "__main__":
    main()
