"""The real coordinator with dozens of emulated workers, a process each: what it costs them, and what they cost it.

The workers' ideal is a closed loop in which every request that ended is followed by the next at once. The share of it
that is reached is what coordinator, environment and this host leave. Two cores, under a minute.

    python benchmarks/scale.py [--workers 32] [--per-worker 4] [--seconds 20]
"""

import argparse
import asyncio
import io
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import uvloop

from pearl.config.loading import load
from pearl.runtime import mmap_counter
from pearl.service.console import Console
from pearl.service.coordinator_process import Service
from pearl.service.log_file import log_to
from pearl.service.run_lock import claim
from pearl.types.config import Config

ROOT = Path(__file__).resolve().parent.parent
LAG_PERIOD_S = 0.005
START_LIMIT_S = 120.0
SETTLE_S = 3.0
OUTPUT_TOKENS, INPUT_TOKENS, PROMPT_TOKENS, NUM_TURNS = 120, 60, 200, 6


class Sample(msgspec.Struct, frozen=True):
    at_s: float
    cpu_s: float  # of this process: the coordinator's
    tokens: int  # made by all workers


class LivenessMonitor:
    """Loop lag and, at both ends of the window, CPU time and tokens; then it ends the run."""

    def __init__(self, run_dir: Path, num_workers: int, seconds: float) -> None:
        self._run_dir = run_dir
        self._num_workers = num_workers
        self._seconds = seconds
        self.lags: list[float] = []
        self.memory: dict[str, list[tuple[float, float]]] = {}
        self.ends: list[Sample] = []

    async def run(self) -> None:
        try:
            await self._until_all_work()
            await asyncio.sleep(SETTLE_S)
            self.ends.append(self._sample())
            await self._feel()
            self.ends.append(self._sample())
            self.memory = memory_of(str(self._run_dir))
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # as a person would end it

    async def _until_all_work(self) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            # The counters belong to other processes, which tell nobody.
            while sum(tokens > 0 for tokens in self._counts()) < self._num_workers:  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def _feel(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + self._seconds
        while due < end:
            due = max(due + LAG_PERIOD_S, loop.time())
            await asyncio.sleep(due - loop.time())
            self.lags.append(loop.time() - due)

    def _counts(self) -> Iterator[int]:
        for path in (self._run_dir / "logs").glob("rollout.*/tokens"):
            yield mmap_counter.read(path) or 0

    def _sample(self) -> Sample:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        now = asyncio.get_running_loop().time()
        return Sample(now, usage.ru_utime + usage.ru_stime, sum(self._counts()))


def memory_of(mark: str) -> dict[str, list[tuple[float, float]]]:
    """(resident, proportional) MiB of the run's processes, by kind."""
    found: dict[str, list[tuple[float, float]]] = {}
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            kinds = [
                kind for kind in ("workers.rollout", "workers.training", "envs") if f"pearl.{kind}" in line
            ]
            if mark in line and kinds:
                info = process.memory_full_info()
                found.setdefault(kinds[0], []).append((info.rss / 2**20, info.pss / 2**20))
        except psutil.Error:  # gone meanwhile
            continue
    return found


def job(num_workers: int, per_worker: int) -> Config:
    in_flight = num_workers * per_worker
    overrides = {
        "run.num_steps": 1000,
        "data.batch_size": in_flight,
        "data.group_size": per_worker if per_worker > 1 else 2,
        "rollout.num_workers": num_workers,
        "rollout.max_in_flight": in_flight,
        "rollout.staleness_bound": 2,
        "rollout.update_mode": "in_place",
        "emulated.train_seconds": 0.2,
        "environment.options.num_turns": NUM_TURNS,
        "environment.options.prompt_tokens": PROMPT_TOKENS,
        "environment.options.turn_input_tokens": INPUT_TOKENS,
        "environment.options.turn_output_tokens": OUTPUT_TOKENS,
        "environment.options.env_seconds": 0.0,
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    return load(ROOT / "launch" / "configs" / "emulated.toml", words)


def ideal_tokens_per_s(config: Config, per_worker: int) -> float:
    """All requests always decode together; for each token made, the prompts' share is prefilled."""
    timing = config.emulated
    new = (PROMPT_TOKENS + INPUT_TOKENS * (NUM_TURNS - 1)) / (OUTPUT_TOKENS * NUM_TURNS)
    iteration_s = timing.decode_fixed_seconds + per_worker * (
        timing.decode_seconds_per_seq + new * timing.prefill_seconds_per_token
    )
    return config.rollout.num_workers * per_worker / iteration_s


async def coordinate(config: Config, run_dir: Path, run_id: str, watch: LivenessMonitor) -> None:
    console = Console(io.StringIO(), config.rollout.num_workers)
    service = Service(config, run_dir, run_id, console, resume=False, trace=())
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        await service.main()
        watching.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--per-worker", type=int, default=4, help="requests at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, after everything is up")
    options = parser.parse_args()
    config = job(options.workers, options.per_worker)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        watch = LivenessMonitor(run_dir, options.workers, options.seconds)
        with claim(run_dir) as claimed, log_to(run_dir / "coordinator.log"):
            uvloop.run(coordinate(config, run_dir, claimed.run_id, watch))
    report(config, options.per_worker, watch)
    return 0


def report(config: Config, per_worker: int, watch: LivenessMonitor) -> None:
    first, last = watch.ends
    seconds = last.at_s - first.at_s
    rate, ideal = (last.tokens - first.tokens) / seconds, ideal_tokens_per_s(config, per_worker)
    lags = sorted(watch.lags)
    print(f"{config.rollout.num_workers} workers, {per_worker} requests each, {seconds:.0f} s")
    print(f"rollout     {rate:,.0f} tokens/s, {rate / ideal:.0%} of the workers' ideal {ideal:,.0f}")
    print(f"coordinator {(last.cpu_s - first.cpu_s) / seconds:.0%} of a core", end="")
    print(
        f", loop lag p50 {lags[len(lags) // 2] * 1e3:.1f} ms, p99 {lags[int(0.99 * (len(lags) - 1))] * 1e3:.1f} ms"
    )
    for kind, rows in watch.memory.items():
        resident, own = max(row[0] for row in rows), sum(row[1] for row in rows) / len(rows)
        print(
            f"{kind:<16} {len(rows):3d} processes, {resident:.0f} MiB resident, {own:.0f} MiB in their share"
        )


if __name__ == "__main__":
    sys.exit(main())
