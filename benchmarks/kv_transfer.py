"""How fast KV goes from one worker to another against what a plain socket allows.

A source and a sink process, each with paged KV of one model and a thread that stands for its engine. The KV is
gathered from the source's pages, hashed, sent, checked and written into the sink's pages. The floor is the same number
of bytes out of one buffer into another over one plain TCP connection. Rounds are interleaved, so that a noisy machine
is noisy for both.

PASS when KV of several attempts at once goes at a tenth of the plain copy's speed at least (median over the rounds):
every byte is also gathered out of pages, hashed twice and scattered into pages, at the speed of memory, and two busy
cores have nobody else to do it. Exit code 1 when it does not.

    python benchmarks/kv_transfer.py [--mib 256] [--attempts 4] [--rounds 5]
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Semaphore
from typing import TypeVar

import numpy as np
import torch

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import Offer
from pearl.workers.rollout.kv_transfer.pages import Begin, Block, Expect, Granted, Landed, Ready
from pearl.workers.rollout.kv_transfer.transport import KvTransport
from pearl.workers.rollout.torch_engine.attention import KvStore
from pearl.workers.rollout.torch_engine.kv_blocks import layout_of, read_block, write_block

T = TypeVar("T")
MIN_RATIO = 0.1
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 36, 8, 128  # an 8B model of today, in bfloat16: 144 KiB a token
TOKEN_BYTES = NUM_LAYERS * NUM_HEADS * HEAD_SIZE * 2 * 2
PAGE_TOKENS = 16
VERSION = Version(0, 0)
LIMIT_S = 120.0
CONTEXT = multiprocessing.get_context("spawn")


class Worker:
    """Pages without a model; each attempt has its own, in a row."""

    def __init__(self, name: str, num_attempts: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        pages = -(-num_attempts * num_tokens // PAGE_TOKENS)
        self.store = KvStore(pages, PAGE_TOKENS)
        for layer in range(NUM_LAYERS):
            some = torch.randn((NUM_HEADS, PAGE_TOKENS, HEAD_SIZE)).bfloat16()
            self.store.write(layer, torch.arange(PAGE_TOKENS, 2 * PAGE_TOKENS), some, some)
            for tensor in self.store.layers[layer]:
                tensor += 1  # touched: no page fault is measured
        self.transport = KvTransport("127.0.0.1", "127.0.0.1", name)
        self.ended = Semaphore(0)
        self._thread = ThreadPoolExecutor(1)
        self.transport.start(self)

    def slots(self, attempt: int, start: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        first = PAGE_TOKENS + attempt % 100 * self.num_tokens + start
        return np.arange(first, first + count)

    async def read(self, attempt: int, start: int, count: int) -> Block | None:
        return await self._call(lambda: read_block(self.store, self.slots(attempt, start, count)))

    async def sent(self, attempt: int) -> None:
        self.ended.release()

    async def offered(self, attempt: int, offer: Offer) -> None:
        self.transport.post([Granted(attempt, 0)])

    async def land(self, attempt: int, version: Version, start: int, count: int, data: Block) -> None:
        layout, device = layout_of(self.store), torch.device("cpu")
        slots = self.slots(attempt, start, count)
        await self._call(lambda: write_block(self.store, slots, data, layout, device))
        if start + count == self.num_tokens:
            self.transport.post([Landed(attempt)])

    async def failed(self, attempt: int, reason: str) -> None:
        print(f"attempt {attempt} failed: {reason}", file=sys.stderr)
        self.ended.release()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def serve(pipe: Connection, num_attempts: int, num_tokens: int) -> None:
    """The sink: expects attempts, and takes plain copies on a socket of its own."""
    torch.set_num_threads(1)
    worker = Worker("sink", num_attempts, num_tokens)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((str(worker.transport.address), listener.getsockname()[1]))
    connected, _ = listener.accept()
    buffer = np.ones(num_attempts * num_tokens * TOKEN_BYTES, np.uint8).data
    while (task := pipe.recv()) is not None:
        if task == "plain":
            position = 0
            while position < len(buffer):
                position += connected.recv_into(buffer[position:])
            connected.sendall(b"!")
        else:
            worker.transport.post([Expect(attempt, "source") for attempt in task])
            pipe.send("expecting")
    worker.transport.close()


class Source:
    def __init__(self, num_attempts: int, num_tokens: int) -> None:
        self._num_attempts = num_attempts
        self._pipe, other = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=serve, args=(other, num_attempts, num_tokens), daemon=True)
        self._process.start()
        self._worker = Worker("source", num_attempts, num_tokens)
        self._address, port = self._pipe.recv()
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._buffer = np.ones(num_attempts * num_tokens * TOKEN_BYTES, np.uint8)
        self._round = 0

    def plain(self) -> float:
        self._pipe.send("plain")
        start = time.perf_counter()
        self._socket.sendall(self._buffer.data)
        assert self._socket.recv(1) == b"!"
        return time.perf_counter() - start

    def transfer(self) -> float:
        """Seconds until all attempts' KV is in the sink's pages and the source knows."""
        self._round += 1
        attempts = [100 * self._round + index for index in range(self._num_attempts)]
        self._pipe.send(attempts)
        self._pipe.recv()
        layout, total = layout_of(self._worker.store), self._worker.num_tokens
        start = time.perf_counter()
        for attempt in attempts:
            ready = Ready(attempt, total, total, VERSION, layout, PAGE_TOKENS)
            self._worker.transport.post([Begin(attempt, self._address), ready])
        for _ in attempts:
            if not self._worker.ended.acquire(timeout=LIMIT_S):
                raise SystemExit(f"an attempt did not end within {LIMIT_S} s")
        return time.perf_counter() - start

    def close(self) -> None:
        self._worker.transport.close()
        self._process.kill()
        self._process.join()


def measure(mib: int, num_attempts: int, num_rounds: int) -> dict[str, list[float]]:
    num_tokens = max(1, (mib << 20) // TOKEN_BYTES // num_attempts // PAGE_TOKENS) * PAGE_TOKENS
    source = Source(num_attempts, num_tokens)
    times: dict[str, list[float]] = {"plain": [], "kv": []}
    try:
        for _ in range(num_rounds + 1):
            times["plain"].append(source.plain())
            times["kv"].append(source.transfer())
    finally:
        source.close()
    num_bytes = num_attempts * num_tokens * TOKEN_BYTES
    return {
        name: [num_bytes / s / 1e9 for s in values[1:]] for name, values in times.items()
    }  # the first warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--attempts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    speeds = measure(arguments.mib, arguments.attempts, arguments.rounds)
    print(
        f"{arguments.mib} MiB of {arguments.attempts} attempts, {TOKEN_BYTES >> 10} KiB a token, on this host"
    )
    for name, values in speeds.items():
        print(
            f"{name:6} median {statistics.median(values):5.2f} GB/s, {min(values):.2f} to {max(values):.2f}"
        )
    ratio = statistics.median(speeds["kv"]) / statistics.median(speeds["plain"])
    is_good = ratio >= MIN_RATIO
    print(f"{'PASS' if is_good else 'FAIL'}: {ratio:.2f} of the plain copy (at least {MIN_RATIO})")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
