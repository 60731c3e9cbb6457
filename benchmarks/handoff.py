"""What handing a device over costs: the operations of the paper's Table 3 and their parts, on one worker of each kind.

A real rollout worker process is started (preparation), takes its weights (finalization), is released and activated
again and again while it serves, and is interrupted and ended (shrink). A training world of one rank lends its state
and takes it back. The memory itself is measured beside one plain copy into freshly released pages of the same kind.

    OMP_NUM_THREADS=1 python benchmarks/handoff.py [--mib 256] [--rounds 5] [--device auto|cpu|cuda]

PASS when a restore takes at most 1.5 x that copy and the release frees at least 95 % of the memory; else exit code 1.
On a GPU it needs torch_memory_saver (pip install 'pearl[cuda]').
"""

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.inbound import Notification, PeerJoined, PeerLost
from pearl.runtime.rpc_server import RpcServer
from pearl.types.config import Config, DataConfig, ModelConfig, RolloutConfig, RuntimeConfig, WarmStartConfig
from pearl.types.messages.control import Ack, Heartbeat, Shutdown
from pearl.types.messages.rollout import (
    Activate,
    ActivateReply,
    Deltas,
    Generate,
    Interrupt,
    Release,
    ReleaseReply,
    SamplingParams,
    UpdateWeights,
    UpdateWeightsReply,
)
from pearl.types.messages.training import Sample
from pearl.types.weights import Snapshot, Version
from pearl.workers.memory_offload.pages import process_bytes
from pearl.workers.memory_offload.saver_for import saver_for
from pearl.workers.model import build_model, resolve_device
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.control import ControlChannel, Report
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.state_offload import TrainingResidency, check, slowest
from pearl.workers.training.trainer import Trainer
from pearl.workers.weight_transfer.checksum import canonical_tensors
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

MAX_RATIO = 1.5
MIN_FREED = 0.95
VOCABULARY = 32
LIMIT_S = 300.0
PEER = "rollout.1.1"
NUM_REQUESTS = 8
"""Under way when the worker is released."""
Parts = Mapping[str, float]


@dataclass
class Table:
    """Seconds of each operation's parts, a mapping a round."""

    rows: dict[str, list[Parts]] = field(default_factory=dict)
    gigabytes: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, parts: Parts, num_bytes: int = 0) -> None:
        self.rows.setdefault(name, []).append(parts)
        self.gigabytes[name] = num_bytes / 1e9

    def show(self) -> None:
        print(f"{'operation':24} {'median s':>9} {'GB/s':>7}  parts")
        for name, rounds in self.rows.items():
            total = statistics.median(sum(parts.values()) for parts in rounds)
            speed = f"{self.gigabytes[name] / total:7.2f}" if self.gigabytes[name] and total else " " * 7
            parts = {part: statistics.median(found[part] for found in rounds) for part in rounds[0]}
            shown = "  ".join(f"{part} {seconds:.4f}" for part, seconds in parts.items())
            print(f"{name:24} {total:9.4f} {speed}  {shown}")


def model_of(mib: int, device: str) -> ModelConfig:
    """About so many MiB of float32 weights; at least one layer of 48 MiB."""
    sizes = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64, "ffn_size": 3072}
    return ModelConfig(num_layers=max(1, round(mib / 48)), device=device, **sizes)  # type: ignore[arg-type]


# memory alone


def measure_memory(table: Table, mib: int, rounds: int, device: torch.device) -> tuple[float, float]:
    """-> (median restore / copy, median ratio freed)."""
    num_bytes = mib << 20
    state = [torch.ones(num_bytes // 64, device=device) for _ in range(16)]
    twin = [torch.ones(num_bytes // 64, device=device) for _ in range(16)]
    source = [torch.ones(num_bytes // 64, pin_memory=device.type == "cuda") for _ in range(16)]
    saver = saver_for(device)
    ratios, freed = [], []
    for index in range(rounds + 1):
        before = taken_bytes(device)
        released = saver.release("state", state, keep=True)
        fallen = (before - taken_bytes(device)) / num_bytes
        saver.release("twin", twin, keep=False)
        saver.restore("twin")
        copy_s = timed_copy(source, twin, device)
        restored = saver.restore("state")
        if index:  # the first round warms up
            ratios.append(restored.restore_s / copy_s)
            freed.append(fallen)
            table.add(
                "release", {"backup": released.backup_s, "release": released.release_s}, released.num_bytes
            )
            table.add("restore", {"restore": restored.restore_s}, num_bytes)
            table.add("copy into fresh pages", {"copy": copy_s}, num_bytes)
    return statistics.median(ratios), statistics.median(freed)


def taken_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return process_bytes()


def timed_copy(source: list[torch.Tensor], target: list[torch.Tensor], device: torch.device) -> float:
    began = time.perf_counter()
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# training


def measure_training(table: Table, config: Config, rounds: int, device: torch.device) -> None:
    """One rank, after one real step: weights and two moments of each."""
    with tempfile.TemporaryDirectory() as directory:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=0, world_size=1)
        checkpoints = CheckpointStore(Path(directory), keep=2)
        trainer = Trainer(config, VOCABULARY, device, checkpoints, Progress())
        trainer.begin(0, ())
        trainer.train(0, samples())
        residency = TrainingResidency(trainer, ControlChannel(), device, verify=True)
        for index in range(rounds + 1):
            offloaded, restored = residency.offload(), residency.restore()
            check(offloaded, "did not leave")
            check(restored, "did not come back")
            if index:
                add_training(table, offloaded, restored)
        dist.destroy_process_group()


def add_training(table: Table, offloaded: list[Report], restored: list[Report]) -> None:
    num_bytes = sum(report.released_bytes for report in offloaded)
    table.add("training offload", slowest(offloaded), num_bytes)
    table.add("training restore", slowest(restored), num_bytes)


def samples() -> tuple[Sample, ...]:
    ids, mask = np.arange(8, dtype="<i4"), np.array([0] * 4 + [1] * 4, np.uint8).tobytes()
    logprobs = np.full(8, -3.4, "<f4").tobytes()
    return tuple(
        Sample(trajectory, 0, float(trajectory), False, 8, ids.tobytes(), mask, logprobs, mask)
        for trajectory in range(2)
    )


# rollout


class Worker:
    """A rollout worker's process behind a real server."""

    def __init__(self, server: RpcServer) -> None:
        self.server = server
        self._attempts = 0
        self._producing = asyncio.Event()
        self._ready = asyncio.Event()

    async def listen(self) -> None:
        while True:
            match await self.server.receive():
                case PeerLost(reason=reason):
                    raise SystemExit(f"the worker was lost: {reason}")
                case Notification(message=Heartbeat(busy="")):
                    self._ready.set()
                case Notification(message=Deltas(deltas=deltas)) if any(delta.ids for delta in deltas):
                    self._producing.set()
                case PeerJoined() | Notification():
                    pass

    async def ready(self) -> None:
        await self._ready.wait()

    async def serve(self) -> None:
        """Returns when the requests have begun to produce."""
        self._producing.clear()
        ids = np.arange(16, dtype="<i4").tobytes()
        for _ in range(NUM_REQUESTS):
            self._attempts += 1
            params = SamplingParams(1000, 1.0, ())
            self.server.notify(PEER, Generate(self._attempts, self._attempts, ids, params, self._attempts))
        await self._producing.wait()

    async def update(self, snapshot: Snapshot) -> UpdateWeightsReply:
        message = UpdateWeights(snapshot, "interrupt", LIMIT_S)
        return await self.server.call(PEER, message, deadline_s=LIMIT_S, reply_type=UpdateWeightsReply)

    async def activate(self, snapshot: Snapshot) -> ActivateReply:
        message = Activate(snapshot, LIMIT_S)
        return await self.server.call(PEER, message, deadline_s=LIMIT_S, reply_type=ActivateReply)

    async def release(self) -> ReleaseReply:
        return await self.server.call(PEER, Release(), deadline_s=LIMIT_S, reply_type=ReleaseReply)

    async def interrupt(self) -> None:
        await self.server.call(PEER, Interrupt(), deadline_s=LIMIT_S, reply_type=Ack)


@asynccontextmanager
async def started(config: Config, root: Path) -> AsyncIterator[tuple[Worker, asyncio.subprocess.Process]]:
    (root / "config.json").write_bytes(msgspec.json.encode(config))
    messages = Deltas | Heartbeat | Ack | UpdateWeightsReply | ReleaseReply | ActivateReply
    async with RpcServer(
        "tcp://127.0.0.1:0",
        run_id="handoff",
        messages=messages,
        queue_messages=4096,
        max_frame_bytes=1 << 26,
        clock=MonotonicClock(),
    ) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
            *("-m", "pearl.workers.rollout.worker", "--address", server.address, "--run-id", "handoff"),
            *("--slot", "1", "--incarnation", "1", "--config", str(root / "config.json")),
            *("--vocabulary-size", str(VOCABULARY)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.TaskGroup() as group:
                worker = Worker(server)
                listening = group.create_task(worker.listen())
                yield worker, process
                listening.cancel()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def measure_rollout(table: Table, config: Config, rounds: int) -> None:
    store = SnapshotStore(1, 0, socket.gethostname(), config.weights.bucket_bytes)
    model = build_model(config.model, VOCABULARY, 1)
    snapshot = store.publish(Version(0, 1), canonical_tensors(model))
    del model
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        async with started(config, Path(directory)) as (worker, process), asyncio.timeout(LIMIT_S):
            await worker.ready()
            table.add("expansion: preparation", {"start": time.perf_counter() - began})
            reply = await worker.update(snapshot)
            parts = {"transfer": reply.transfer_seconds, "load": reply.load_seconds}
            table.add("expansion: finalization", parts, snapshot.num_bytes)
            for index in range(rounds + 1):
                await worker.serve()
                released = await worker.release()
                activated = await worker.activate(snapshot)
                if index:
                    table.add("deactivation", released.parts, released.released_bytes)
                    table.add("activation", activated.parts, snapshot.num_bytes)
            await shrink(table, worker, process)
    store.close()


async def shrink(table: Table, worker: Worker, process: asyncio.subprocess.Process) -> None:
    await worker.serve()
    began = time.perf_counter()
    await worker.interrupt()
    interrupted = time.perf_counter()
    worker.server.notify(PEER, Shutdown("reclaimed"))
    await process.wait()
    table.add("shrink", {"interrupt": interrupted - began, "exit": time.perf_counter() - interrupted})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="of weights, and of the memory measured alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = Config(
        model=model_of(options.mib, options.device),
        data=DataConfig(batch_size=2, group_size=2),
        rollout=RolloutConfig(kv_capacity_tokens=4096),
        warm_start=WarmStartConfig(num_steps=0),
        runtime=RuntimeConfig(lease_s=LIMIT_S, update_timeout_s=LIMIT_S),
    )
    device = resolve_device(config.model)
    table = Table()
    ratio, freed = measure_memory(table, options.mib, options.rounds, device)
    measure_training(table, config, options.rounds, device)
    asyncio.run(measure_rollout(table, config, options.rounds))
    print(f"{options.mib} MiB of weights on {device}; medians of {options.rounds}")
    table.show()
    good = ratio <= MAX_RATIO and freed >= MIN_FREED
    print(f"a restore takes {ratio:.2f} x one copy into freshly released pages (at most {MAX_RATIO})")
    print(f"a release frees {freed:.1%} of the memory (at least {MIN_FREED:.0%})")
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
