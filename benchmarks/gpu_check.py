"""What only a GPU can show, on one GPU and in under eight minutes: memory handed over for real.

- trainer: an FSDP2 trainer's state off the GPU by torch_memory_saver and back: bytes, seconds, GB/s, bit for bit;
- SGLang: a real server that serves, releases its weights and KV, takes the weights again and answers as before;
- links: memory and time of 1 to 64 NCCL links, where there are two GPUs.

Each part runs in a process of its own with a limit; what could not run is said, with why, and never estimated.

    OMP_NUM_THREADS=1 python benchmarks/gpu_check.py [--mib 2048] [--rounds 3] [--python SGLANG_PYTHON] [--part P]

Needs torch with CUDA, pip install 'pearl[cuda]', and for SGLang pip install 'pearl[sglang]' (in any environment, named
by --python). Exit code 0: all that could run was right; 1: a part ran and was wrong; 3: nothing could run.
"""

import argparse
import asyncio
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pearl.types.config import Config, DataConfig, ModelConfig, RolloutConfig, SglangConfig, WarmStartConfig
from pearl.types.messages.rollout import SamplingParams
from pearl.types.messages.training import Sample
from pearl.types.weights import BucketSpec, Version
from pearl.workers.memory_offload.saver import MIN_FREED_RATIO
from pearl.workers.model import build_model
from pearl.workers.rollout.protocol import Delta, GenerateRequest, MemoryTag
from pearl.workers.rollout.sglang.engine import SglangEngine
from pearl.workers.rollout.sglang.memory import held_bytes
from pearl.workers.rollout.sglang.model_files import write_model
from pearl.workers.rollout.sglang.server import Server
from pearl.workers.rollout.sglang.settings import settings_of
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.control import ControlChannel
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.state_offload import TrainingResidency, check, slowest
from pearl.workers.training.trainer import Trainer
from pearl.workers.weight_transfer.checksum import canonical_tensors, dtype_name, tensor_bytes
from pearl.workers.weight_transfer.snapshot_layout import bucket_edges, image_bytes, lay_out

VOCABULARY = 4096
HIDDEN = 2048
FFN = 8192
PART_LIMIT_S = 150.0
TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")
NUM_LINKS = (1, 2, 4, 8, 16, 32, 64)


class CannotRun(Exception):
    """This host lacks what the part needs."""


def config_of(mib: int, python: str) -> Config:
    layer_bytes = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * FFN)
    model = ModelConfig(
        dtype="bfloat16",
        num_layers=max(1, (mib << 20) // layer_bytes),
        hidden_size=HIDDEN,
        ffn_size=FFN,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        device="cuda",
    )
    return Config(
        model=model,
        data=DataConfig(batch_size=2, group_size=2),
        rollout=RolloutConfig(engine="sglang", max_context_tokens=2048, kv_capacity_tokens=65536),
        warm_start=WarmStartConfig(num_steps=0),
        sglang=SglangConfig(python=python),
    )


def line(what: str, num_bytes: int, seconds: float) -> None:
    rate = num_bytes / seconds / 1e9 if seconds > 0 else float("nan")
    print(f"  {what:<34} {num_bytes / 2**20:10.0f} MiB {seconds:9.3f} s {rate:8.2f} GB/s", flush=True)


def expect(holds: bool, what: str) -> None:
    print(f"  {'ok' if holds else 'WRONG'}: {what}", flush=True)
    if not holds:
        raise SystemExit(1)


def need_gpus(count: int) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < count:
        raise CannotRun(f"needs {count} CUDA device(s), torch {torch.__version__} finds {found}")


# The trainer


def trainer(config: Config, rounds: int) -> None:
    need_gpus(1)
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise CannotRun("torch_memory_saver is not installed: pip install 'pearl[cuda]'")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{directory}/store", rank=0, world_size=1
        )
        subject = Trainer(config, VOCABULARY, device, CheckpointStore(Path(directory), keep=1), Progress())
        subject.begin(0, ())
        subject.train(0, samples())
        residency = TrainingResidency(subject, ControlChannel(), device, verify=True)
        for _ in range(rounds):
            lend(residency, device)
        subject.train(1, samples())
        expect(True, "the state came back bit for bit each time, and a step of training runs on it")
        dist.destroy_process_group()


def lend(residency: TrainingResidency, device: torch.device) -> None:
    before = torch.cuda.mem_get_info(device)[0]
    reports = residency.offload()
    check(reports, "did not leave")
    freed = torch.cuda.mem_get_info(device)[0] - before
    parts = slowest(reports)
    line("offload (backup + release)", reports[0].released_bytes, parts["backup"] + parts["release"])
    expect(
        freed >= MIN_FREED_RATIO * reports[0].released_bytes, f"{freed / 2**20:.0f} MiB are free on the GPU"
    )
    restored = residency.restore()
    check(restored, "did not come back")  # compares digests
    line("restore", reports[0].released_bytes, slowest(restored)["restore"])


def samples() -> tuple[Sample, ...]:
    ids, mask = np.arange(8, dtype="<i4"), np.array([0] * 4 + [1] * 4, np.uint8).tobytes()
    logprobs = np.full(8, -3.4, "<f4").tobytes()
    return tuple(
        Sample(trajectory, 0, float(trajectory), False, 8, ids.tobytes(), mask, logprobs, mask)
        for trajectory in range(2)
    )


# SGLang


def sglang(config: Config, rounds: int) -> None:
    need_gpus(1)
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    if subprocess.run([config.sglang.python, "-c", code], check=False).returncode:
        raise CannotRun(
            f"SGLang is not installed for {config.sglang.python}: pip install 'pearl[sglang]', or name --python"
        )
    asyncio.run(serve(config, rounds))


async def serve(config: Config, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        settings = settings_of(
            config,
            python=config.sglang.python,
            model_directory=directory / "model",
            uses_gpu=True,
            log_path=directory / "sglang.log",
        )
        server = Server(settings)
        async with asyncio.TaskGroup() as group:
            engine = SglangEngine(
                settings,
                server,
                lambda: write_model(config.model, VOCABULARY, settings.model_directory),
                group,
                start_limit_s=PART_LIMIT_S,
            )
            try:
                await hand_over(engine, server, config, rounds)
            finally:
                await engine.shutdown()


async def hand_over(engine: SglangEngine, server: Server, config: Config, rounds: int) -> None:
    began = time.perf_counter()
    await engine.start()
    print(f"  the server took {time.perf_counter() - began:.1f} s to start", flush=True)
    model = build_model(config.model, VOCABULARY, 1)
    num_bytes = sum(tensor.nbytes for _, tensor in canonical_tensors(model))
    began = time.perf_counter()
    await take(engine, model)
    line("weights into SGLang, proven", num_bytes, time.perf_counter() - began)
    before = await answer(engine, 0)
    assert server.pid is not None
    for number in range(1, rounds + 1):
        await engine.pause("abort")
        held = held_bytes(server.pid, uses_gpu=True)
        released = await engine.release(TAGS)
        assert released is not None
        freed = held - held_bytes(server.pid, uses_gpu=True)
        line("release of weights and KV", freed, released.release_s)
        expect(freed > num_bytes, "more than the weights is free on the GPU")
        began = time.perf_counter()
        await engine.restore(("weights",))
        line("restore of the weights' memory", num_bytes, time.perf_counter() - began)
        await take(engine, model)
        began = time.perf_counter()
        await engine.restore(("kv_cache", "cuda_graph"))
        line("restore of the KV's memory", max(0, freed - num_bytes), time.perf_counter() - began)
        await engine.continue_generation()
        expect(await answer(engine, number) == before, "the greedy answer is the one before the release")


async def take(engine: SglangEngine, model: torch.nn.Module) -> None:
    tensors = canonical_tensors(model)
    specs = lay_out((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors)
    data = bytearray(image_bytes(specs))
    for spec, (_, tensor) in zip(specs, tensors, strict=True):
        data[spec.offset : spec.offset + spec.num_bytes] = tensor_bytes(tensor)
    await engine.begin_update(Version(0, 1), specs)
    view = memoryview(data)
    for start, size in bucket_edges(len(data), 64 << 20):
        await engine.update_bucket(BucketSpec(start, size, ""), view[start : start + size])
    await engine.end_update()


async def answer(engine: SglangEngine, attempt: int) -> list[int]:
    ids: list[int] = []
    over = asyncio.Event()

    def emit(delta: Delta) -> None:
        ids.extend(delta.ids)
        if delta.is_last:
            over.set()

    prompt = np.arange(1, 65, dtype=np.int32)
    await engine.generate(GenerateRequest(attempt, prompt, SamplingParams(64, 0.0, ()), 1), emit)
    async with asyncio.timeout(PART_LIMIT_S):
        await over.wait()
    return ids


# Links


def links(config: Config, rounds: int) -> None:
    need_gpus(2)
    from torch.multiprocessing.spawn import spawn

    for count in NUM_LINKS:
        with tempfile.TemporaryDirectory() as directory:
            spawn(link_end, (count, directory), nprocs=2, join=True)  # type: ignore[no-untyped-call]


def link_end(rank: int, count: int, directory: str) -> None:
    """One GPU's end of ``count`` groups of two, as one link each would be."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    data = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    before = torch.cuda.mem_get_info(device)[0]
    began = time.perf_counter()
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(count)]
    for group in groups:
        dist.broadcast(data, 0, group=group)
    torch.cuda.synchronize(device)
    made_s, taken = time.perf_counter() - began, before - torch.cuda.mem_get_info(device)[0]
    began = time.perf_counter()
    for group in groups:
        dist.broadcast(data, 0, group=group)
    torch.cuda.synchronize(device)
    if rank == 0:
        line(f"{count} links made (memory taken)", taken, made_s)
        line(f"{count} links, 64 MiB each", count * data.nbytes, time.perf_counter() - began)
    dist.destroy_process_group()


PARTS: dict[str, Callable[[Config, int], None]] = {"trainer": trainer, "sglang": sglang, "links": links}
CANNOT = 3
"""Exit code of a part that this host cannot run, and of the whole when it can run none."""


def run_part(name: str, config: Config, rounds: int) -> int:
    print(f"{name}:", flush=True)
    try:
        PARTS[name](config, rounds)
    except CannotRun as error:
        print(f"  could not run: {error}", flush=True)
        return CANNOT
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=2048, help="of weights, roughly")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has SGLang")
    parser.add_argument("--part", choices=PARTS, help="this one only, in this process")
    options = parser.parse_args()
    if options.part is not None:
        return run_part(options.part, config_of(options.mib, options.python), options.rounds)
    ran, wrong = [], []
    for name in PARTS:
        command = [sys.executable, *sys.argv, "--part", name]
        try:
            code = subprocess.run(command, check=False, timeout=PART_LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            print(f"  WRONG: not done within {PART_LIMIT_S:g} s")
            code = 1
        if code != CANNOT:
            ran.append(name)
        if code not in (0, CANNOT):
            wrong.append(name)
    missing = [name for name in PARTS if name not in ran]
    print(f"ran: {', '.join(ran) or 'nothing'}; could not run: {', '.join(missing) or 'nothing'}")
    if wrong:
        print("FAIL: " + ", ".join(wrong))
        return 1
    print("PASS, of what could run" if ran else "NOTHING SHOWN: this host can run no part")
    return 0 if ran else CANNOT


if __name__ == "__main__":
    sys.exit(main())
