"""The training world as the coordinator meets it: two ranks under torchrun, spoken to over ZeroMQ."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from training_worlds import CONFIG, VOCABULARY, make_demonstrations, make_samples, with_training

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.errors import RemoteError
from pearl.runtime.inbound import PeerJoined
from pearl.runtime.rpc_server import RpcServer
from pearl.types.config import Config
from pearl.types.messages.control import Ack, Heartbeat, Hello, Shutdown
from pearl.types.messages.training import (
    AddDemonstrations,
    AddSamples,
    Offload,
    OffloadReply,
    Restore,
    RestoreReply,
    StartTraining,
    StartTrainingReply,
    TrainStep,
    TrainStepReply,
)
from pearl.types.weights import Version
from pearl.workers.weight_transfer.mapped_image import MappedImage

PEER = "training.0.1"
START_S = 100.0  # two ranks and their launcher import torch; on busy cores that takes a while
ANSWER_S = 40.0
Messages = Hello | Heartbeat | Ack | StartTrainingReply | TrainStepReply | OffloadReply | RestoreReply


@contextlib.asynccontextmanager
async def world(
    config: Config, root: Path, num_ranks: int
) -> AsyncIterator[tuple[RpcServer, asyncio.subprocess.Process]]:
    (root / "config.json").write_bytes(msgspec.json.encode(config))
    async with RpcServer(
        "tcp://127.0.0.1:0",
        run_id="run",
        messages=Messages,
        queue_messages=4096,  # heartbeats that nobody reads here
        max_frame_bytes=1 << 24,
        clock=MonotonicClock(),
    ) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
            *("-m", "pearl.workers.training.worker", "--address", server.address, "--run-id", "run"),
            *("--incarnation", "1", "--config", str(root / "config.json"), "--run-dir", str(root)),
            *("--vocabulary-size", str(VOCABULARY)),
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            async with asyncio.timeout(START_S):
                joined = await server.receive()
            assert isinstance(joined, PeerJoined)
            assert joined.peer == PEER
            yield server, process
        finally:
            ranks = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def ask(server: RpcServer, message: Any) -> Any:
    return await server.call(PEER, message, deadline_s=ANSWER_S)


@pytest.mark.timeout(180)
async def test_two_ranks_start_train_publish_and_leave(tmp_path: Path) -> None:
    warm = msgspec.structs.replace(CONFIG.warm_start, num_steps=2, batch_size=4, num_demonstrations=8)
    model = msgspec.structs.replace(CONFIG.model, hidden_size=128, ffn_size=256)  # tensors of several pages
    config = msgspec.structs.replace(with_training(num_ranks=2), warm_start=warm, model=model)
    async with world(config, tmp_path, num_ranks=2) as (server, process):
        await ask(server, AddDemonstrations(make_demonstrations(8)))
        started = await ask(server, StartTraining(3, None))
        assert started.snapshot.version == Version(3, 0)
        assert started.metrics["warm_start_steps"] == 2
        samples = make_samples(6)
        await ask(server, AddSamples(0, samples[4:]))
        with pytest.raises(RemoteError, match="step 0 is to be trained on 6 samples, 2 came"):
            await ask(server, TrainStep(0, 6, True))
        await ask(server, AddSamples(0, samples[:4]))
        trained = await ask(server, TrainStep(0, 6, True))
        assert (trained.snapshot.version, trained.checkpoint_step) == (Version(3, 1), 1)
        assert trained.metrics["samples_trained"] == 6
        image = MappedImage(trained.snapshot, trained.snapshot.sources[0])
        image.close()
        offloaded = await ask(server, Offload())
        assert offloaded.released_bytes > 1 << 20
        assert set(offloaded.parts) == {"backup", "release", "verify"}
        await ask(server, AddSamples(1, samples))
        with pytest.raises(RemoteError, match="off its devices; restore it first"):
            await ask(server, TrainStep(1, 6, False))
        MappedImage(trained.snapshot, trained.snapshot.sources[0]).close()
        assert set((await ask(server, Restore())).parts) == {"restore", "verify"}
        assert (await ask(server, TrainStep(1, 6, False))).snapshot.version == Version(3, 2)
        assert trained.snapshot.checksum != started.snapshot.checksum
        server.notify(PEER, Shutdown("the test is over"))
        async with asyncio.timeout(ANSWER_S):
            assert await process.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_rank_that_dies_ends_the_world_and_the_next_restores(tmp_path: Path) -> None:
    config = with_training(num_ranks=2)
    samples = make_samples(6)
    async with world(config, tmp_path, num_ranks=2) as (server, process):
        await ask(server, StartTraining(0, None))
        await ask(server, AddSamples(0, samples))
        first = await ask(server, TrainStep(0, 6, True))
        leader = server.hello(PEER).pid
        [other] = [child for child in psutil.Process(process.pid).children() if child.pid != leader]
        other.send_signal(signal.SIGKILL)
        async with asyncio.timeout(ANSWER_S):
            assert await process.wait() != 0
        assert not psutil.pid_exists(leader)
    async with world(config, tmp_path, num_ranks=1) as (server, process):
        restored = await ask(server, StartTraining(1, 1))
        assert restored.restored
        assert restored.snapshot.version == Version(1, 1)
        assert restored.snapshot.checksum == first.snapshot.checksum
