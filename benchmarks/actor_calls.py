"""Calls of an actor in another process: PEARL's ask against a Ray actor method, same payload, same machine.

Both sides do all they do in a run: typed messages, deadlines, bounded queues, heartbeats. A call carries 256 bytes and
brings back 256. Measured are the latency of one call after the other and the rate with 64 calls in flight, in rounds
taken in turn, of which each side's best counts. Ray is installed into a throw-away virtual environment (about 300 MB,
needs pip).

    python benchmarks/actor_calls.py [--no-ray] [--ray ray==2.60.0]

Needs 2 cores and 2 to 5 minutes. Exit code 1 when a ratio falls short of what is required.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.inbound import PeerJoined
from pearl.runtime.rpc_client import RpcClient
from pearl.runtime.rpc_server import RpcServer
from pearl.types.messages.control import Heartbeat, Hello, Shutdown

REQUIRED_LATENCY_RATIO = 0.25  # PEARL's median over Ray's, at most
REQUIRED_RATE_RATIO = 5.0  # PEARL's calls a second over Ray's, at least
ROUNDS = 3
SEQUENTIAL_CALLS = 2000
CONCURRENT_CALLS = 10_000
WARM_UP_CALLS = 200
IN_FLIGHT = 64
PAYLOAD = bytes(256)
DEADLINE_S = 10.0
JOIN_LIMIT_S = 30.0
INSTALL_LIMIT_S = 900.0
RAY_LIMIT_S = 300.0


class Call(msgspec.Struct, frozen=True, tag=True):
    number: int
    payload: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    payload: bytes


class Figures(NamedTuple):
    p50_us: float
    p99_us: float
    calls_per_s: float  # with IN_FLIGHT calls in flight


RAY_PROGRAM = f"""
import asyncio, json, sys, time, ray

@ray.remote
class Echo:
    async def call(self, number, payload):
        return number, payload

async def main():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
             _temp_dir=sys.prefix + "/ray")
    echo = Echo.remote()
    payload = bytes({len(PAYLOAD)})
    for number in range({WARM_UP_CALLS}):
        await echo.call.remote(number, payload)
    took = []
    for number in range({SEQUENTIAL_CALLS}):
        began = time.perf_counter()
        await echo.call.remote(number, payload)
        took.append(time.perf_counter() - began)
    numbers = iter(range({CONCURRENT_CALLS}))
    async def keep_calling():
        for number in numbers:
            await echo.call.remote(number, payload)
    began = time.perf_counter()
    await asyncio.gather(*(keep_calling() for _ in range({IN_FLIGHT})))
    rate = {CONCURRENT_CALLS} / (time.perf_counter() - began)
    took.sort()
    print("FIGURES " + json.dumps([took[len(took) // 2] * 1e6, took[len(took) * 99 // 100] * 1e6, rate]))

asyncio.run(main())
"""


def serve(address: str) -> None:
    """The actor's process."""

    async def answer(call: Call) -> Answer:
        return Answer(call.number, call.payload)

    peer = RpcClient(
        address,
        hello=Hello("rollout", 0, 1, "localhost", 0, "benchmark"),
        messages=Call,
        handler=answer,
        heartbeat=lambda: Heartbeat(progress=0),
        heartbeat_period_s=0.5,
        lease_s=10.0,
        queue_messages=4096,
        max_frame_bytes=64 << 20,
    )
    uvloop.run(peer.run())


async def measure_calls(call: Callable[[int], Awaitable[object]]) -> Figures:
    for number in range(WARM_UP_CALLS):
        await call(number)
    took: list[float] = []
    for number in range(SEQUENTIAL_CALLS):
        began = time.perf_counter()
        await call(number)
        took.append(time.perf_counter() - began)
    numbers = iter(range(CONCURRENT_CALLS))

    async def keep_calling() -> None:
        for number in numbers:
            await call(number)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(keep_calling())
    rate = CONCURRENT_CALLS / (time.perf_counter() - began)
    took.sort()
    return Figures(took[len(took) // 2] * 1e6, took[len(took) * 99 // 100] * 1e6, rate)


async def measure_pearl() -> Figures:
    server = RpcServer(
        "tcp://127.0.0.1:0",
        run_id="benchmark",
        messages=Answer | Heartbeat,
        queue_messages=4096,
        max_frame_bytes=64 << 20,
        clock=MonotonicClock(),
    )
    async with server:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(server.address,))
        process.start()
        try:
            async with asyncio.timeout(JOIN_LIMIT_S):
                joined = await server.receive()
            assert isinstance(joined, PeerJoined)
            return await measure_peer(server, joined.peer)
        finally:
            process.join(5.0)
            process.kill()


async def measure_peer(server: RpcServer, peer: str) -> Figures:
    async def call(number: int) -> Answer:
        return await server.call(peer, Call(number, PAYLOAD), deadline_s=DEADLINE_S, reply_type=Answer)

    async def take_heartbeats() -> None:
        while True:
            await server.receive()

    async with asyncio.TaskGroup() as group:
        receiver = group.create_task(take_heartbeats())
        figures = await measure_calls(call)
        receiver.cancel()
        server.notify(peer, Shutdown("done"))
    return figures


def install_ray(requirement: str, directory: str) -> str:
    """Returns the interpreter that has it."""
    print(f"installing {requirement} into {directory} …", flush=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=INSTALL_LIMIT_S)
    python = str(Path(directory) / "bin" / "python")
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", requirement]
    subprocess.run(install, check=True, timeout=INSTALL_LIMIT_S)
    return python


def measure_ray(python: str) -> Figures:
    done = subprocess.run(
        [python, "-c", RAY_PROGRAM], check=True, timeout=RAY_LIMIT_S, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("FIGURES "))
    return Figures(*json.loads(line.removeprefix("FIGURES ")))


def best(rounds: list[Figures]) -> Figures:
    """Others on the machine only ever make it worse."""
    return Figures(*min(rounds)[:2], max(figures.calls_per_s for figures in rounds))


def show(name: str, figures: Figures) -> None:
    print(
        f"{name:<10} p50 {figures.p50_us:7.0f} us   p99 {figures.p99_us:7.0f} us   "
        f"{figures.calls_per_s:8.0f} calls/s with {IN_FLIGHT} in flight",
        flush=True,
    )


def compare(python: str) -> bool:
    pearl_rounds: list[Figures] = []
    ray_rounds: list[Figures] = []
    for _ in range(ROUNDS):  # in turn, so that both meet the same machine
        pearl_rounds.append(uvloop.run(measure_pearl()))
        show("PEARL ask", pearl_rounds[-1])
        ray_rounds.append(measure_ray(python))
        show("Ray actor", ray_rounds[-1])
    pearl, ray = best(pearl_rounds), best(ray_rounds)
    latency, rate = pearl.p50_us / ray.p50_us, pearl.calls_per_s / ray.calls_per_s
    passed = latency <= REQUIRED_LATENCY_RATIO and rate >= REQUIRED_RATE_RATIO
    print(
        f"{'PASS' if passed else 'FAIL'}: best against best, latency ratio {latency:.2f} (at most "
        f"{REQUIRED_LATENCY_RATIO}), rate ratio {rate:.1f} (at least {REQUIRED_RATE_RATIO})"
    )
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description="PEARL's ask against a Ray actor call.")
    parser.add_argument("--no-ray", action="store_true", help="PEARL's figures only")
    parser.add_argument("--ray", default="ray", metavar="REQUIREMENT", help="what pip installs")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.no_ray:
        show("PEARL ask", best([uvloop.run(measure_pearl()) for _ in range(ROUNDS)]))
        return 0
    with tempfile.TemporaryDirectory(prefix="pearl-ray-") as directory:
        return 0 if compare(install_ray(options.ray, directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
