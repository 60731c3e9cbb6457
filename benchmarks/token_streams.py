"""What 16 token streams of 800 tokens/s each cost the coordinator: its CPU and its loop's lag.

The coordinator is the real one: server, ingest, token store, core, journal, run files. Node agent, environments,
trainer and rollout workers are emulated in a second process (pearl/testing/cluster.py) and stream a frame of 16
tokens every 20 ms. The floor in the same run is decoding those frames and nothing else. Two cores, half a minute.

    python benchmarks/token_streams.py
"""

import argparse
import asyncio
import io
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from pearl.runtime.codec import encode
from pearl.service import recovery
from pearl.service.console import Console
from pearl.service.run_files import RunFiles
from pearl.service.run_loop import RunLoop
from pearl.testing.cluster import Cluster
from pearl.testing.fakes import RUN_ID, FakeRollout, floats, pack
from pearl.types.config import (
    Config,
    DataConfig,
    EnvironmentConfig,
    RolloutConfig,
    RunConfig,
    WarmStartConfig,
)
from pearl.types.messages import control, rollout
from pearl.types.trajectory import VersionRun
from pearl.types.weights import Version

NUM_STREAMS = 16
TOKENS_PER_S = 800
FRAME_S = 0.02
FRAME_TOKENS = int(TOKENS_PER_S * FRAME_S)
TURN_TOKENS = 6400  # eight seconds a turn
MAX_CPU_RATIO = 0.6
MAX_LAG_P99_S = 0.02
SAMPLE_S = 0.5
CONFIG = Config(
    run=RunConfig(num_steps=1),
    data=DataConfig(batch_size=NUM_STREAMS, group_size=4),
    environment=EnvironmentConfig(num_evaluation_tasks=0),
    rollout=RolloutConfig(
        num_workers=NUM_STREAMS,
        max_requests_per_worker=1,
        max_new_tokens_per_turn=TURN_TOKENS,
        max_context_tokens=10 * TURN_TOKENS,
    ),
    warm_start=WarmStartConfig(num_steps=0),
)


class Streamer(FakeRollout):
    """Streams every request at the nominal rate, on absolute deadlines."""

    async def handle(self, message: Any) -> Any:
        if isinstance(message, rollout.Generate):
            assert self.cluster._group is not None
            self.cluster._group.create_task(self.generate(message), name=f"stream {message.attempt}")
            return None
        return await super().handle(message)

    async def generate(self, request: rollout.Generate) -> None:
        version = self.version
        assert version is not None
        loop = asyncio.get_running_loop()
        due = loop.time()
        for done in range(0, request.params.max_new_tokens, FRAME_TOKENS):
            due += FRAME_S
            await asyncio.sleep(max(0.0, due - loop.time()))
            last = done + FRAME_TOKENS >= request.params.max_new_tokens
            await self.stream(request, [2] * FRAME_TOKENS, version, "length" if last else None)
            self.progress += 1


class RemoteCluster:
    """Stands in for the node agent's process: starts the cluster in a process of its own."""

    def __init__(self) -> None:
        self._report: asyncio.Future[control.AgentReport] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None

    async def launch(self, address: str) -> None:
        self._process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--cluster", address)

    async def report(self) -> control.AgentReport:
        return await self._report

    def reported(self, report: control.AgentReport) -> None:
        self._report.set_result(report)

    async def wait_exited(self) -> str:
        assert self._process is not None
        return f"the cluster ended with {await self._process.wait()}"

    async def end(self, limit_s: float) -> bool:
        assert self._process is not None
        async with asyncio.timeout(limit_s):
            await self._process.wait()
        return True


class Sampler:
    """Loop lag every 5 ms; CPU time and tokens every half second."""

    def __init__(self, count_tokens: Any) -> None:
        self._count_tokens = count_tokens
        self.lags: list[tuple[float, float]] = []
        self.samples: list[tuple[float, float, int]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        next_sample = due
        while True:
            due = max(due + 0.005, loop.time())
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self.lags.append((now, now - due))
            if now >= next_sample:
                usage = resource.getrusage(resource.RUSAGE_SELF)
                self.samples.append((now, usage.ru_utime + usage.ru_stime, self._count_tokens()))
                next_sample = now + SAMPLE_S

    def steady(self) -> tuple[float, float, float, float]:
        """(seconds, CPU ratio, tokens/s, lag p99) while at least 90 % of the nominal rate flowed."""
        nominal = NUM_STREAMS * TOKENS_PER_S
        good = [
            (a, b)
            for a, b in zip(self.samples, self.samples[1:], strict=False)
            if b[2] - a[2] >= 0.9 * nominal * (b[0] - a[0])
        ]
        if not good:
            raise SystemExit(f"FAIL: the nominal {nominal} tokens/s never flowed: {self.samples}")
        seconds = sum(b[0] - a[0] for a, b in good)
        cpu = sum(b[1] - a[1] for a, b in good)
        tokens = sum(b[2] - a[2] for a, b in good)
        begin, end = good[0][0][0], good[-1][1][0]
        lags = sorted(lag for at, lag in self.lags if begin <= at <= end)
        return seconds, cpu / seconds, tokens / seconds, lags[int(0.99 * (len(lags) - 1))]


def decode_floor(seconds: float) -> float:
    """CPU ratio of decoding as many frames as came in ``seconds`` of the run."""
    runs = (VersionRun(Version(0, 0), FRAME_TOKENS, Version(0, 0)),)
    ids, logprobs = pack([2] * FRAME_TOKENS), floats([-0.5] * FRAME_TOKENS)
    delta = rollout.AttemptDelta(1, ids, logprobs, runs, 0, None)
    frame = encode(rollout.Deltas(0, (delta,)))
    decoder = msgspec.msgpack.Decoder(rollout.RolloutMessage)
    frames = int(NUM_STREAMS * seconds / FRAME_S)
    begin = time.process_time()
    for _ in range(frames):
        decoder.decode(frame)
    return (time.process_time() - begin) / seconds


async def coordinate(run_dir: Path) -> Sampler:
    files = RunFiles(run_dir)
    files.write_config(CONFIG)
    beginning = recovery.fresh(CONFIG, files)
    cluster = RemoteCluster()
    console = Console(io.StringIO(), NUM_STREAMS)
    run_loop = RunLoop(CONFIG, RUN_ID, files, console, beginning, cluster)  # type: ignore[arg-type]
    sampler = Sampler(lambda: beginning.core._state.counters.tokens_generated)
    async with run_loop.make_server() as server, asyncio.TaskGroup() as group:
        sampling = group.create_task(sampler.run())
        await run_loop.run(server)
        sampling.cancel()
    beginning.journal.close()
    files.close()
    return sampler


async def emulate(address: str) -> None:
    cluster = Cluster(CONFIG)
    cluster.kinds["rollout"] = Streamer
    await cluster.launch(address)
    await cluster.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cluster:
        uvloop.run(emulate(options.cluster))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        sampler = uvloop.run(coordinate(Path(directory)))
    seconds, cpu, rate, lag = sampler.steady()
    floor = decode_floor(seconds)
    print(
        f"{NUM_STREAMS} streams, {rate:,.0f} tokens/s, {NUM_STREAMS / FRAME_S:.0f} frames/s for {seconds:.1f} s"
    )
    print(f"coordinator: {cpu:.0%} of a core, {cpu / floor:.1f}x decoding the same frames ({floor:.1%})")
    print(f"loop lag p99: {lag * 1e3:.1f} ms")
    passed = cpu <= MAX_CPU_RATIO and lag <= MAX_LAG_P99_S
    needs = f"needs <= {MAX_CPU_RATIO:.0%} of a core and a lag <= {MAX_LAG_P99_S * 1e3:.0f} ms"
    print(f"{'PASS' if passed else 'FAIL'}: {needs}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
