"""The processes of emulated workers: light, without torch, and the real worker's service in front."""

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.inbound import Notification, PeerJoined
from pearl.runtime.rpc_server import RpcServer
from pearl.types import emulated_tokens
from pearl.types.config import Config, EmulatedConfig, RuntimeConfig
from pearl.types.messages.control import Heartbeat, Shutdown
from pearl.types.messages.rollout import (
    Activate,
    ActivateReply,
    Deltas,
    Generate,
    Release,
    ReleaseReply,
    SamplingParams,
    UpdateWeights,
    UpdateWeightsReply,
)
from pearl.types.weights import SnapshotSource, Version
from pearl.workers.emulated_model import snapshot_of
from pearl.workers.rollout.emulated.engine import NOMINAL_WEIGHT_BYTES, EmulatedEngine
from pearl.workers.rollout.emulated.worker import serve
from pearl.workers.rollout.process import parse

LIMIT_S = 20.0
PEER = "rollout.3.1"
CONFIG = Config(
    runtime=RuntimeConfig(heartbeat_period_s=0.05, lease_s=LIMIT_S),
    emulated=EmulatedConfig(
        decode_fixed_seconds=2e-4,
        decode_seconds_per_seq=1e-5,
        start_seconds=0.1,
        update_seconds=0.01,
        activation_seconds=0.01,
        release_seconds=0.01,
    ),
)
SOURCE = SnapshotSource(0, 1, "here", "", "")
MAX_RSS_MB = 80


class Coordinator:
    def __init__(self, server: RpcServer) -> None:
        self.server = server
        self.finish: dict[int, str] = {}
        self.tokens: dict[int, int] = {}
        self.joined = asyncio.Event()
        self._told = asyncio.Event()

    async def listen(self) -> None:
        while True:
            match await self.server.receive():
                case PeerJoined():
                    self.joined.set()
                case Notification(message=Deltas() as frame):
                    for delta in frame.deltas:
                        self.tokens[delta.attempt] = self.tokens.get(delta.attempt, 0) + len(delta.ids) // 4
                        if delta.finish is not None:
                            self.finish[delta.attempt] = delta.finish
            self._told.set()

    def generate(self, attempt: int, asked: int) -> None:
        ids = np.array([5, 6, 7, emulated_tokens.length_id(asked)], "<i4").tobytes()
        params = SamplingParams(1000, 1.0, (emulated_tokens.STOP_ID,))
        self.server.notify(PEER, Generate(attempt, attempt, ids, params, attempt))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._told.clear()
                await self._told.wait()

    async def ask(self, message: Any, reply_type: Any) -> Any:
        return await self.server.call(PEER, message, deadline_s=LIMIT_S, reply_type=reply_type)


async def converse(coordinator: Coordinator) -> None:
    first, second = (snapshot_of(Version(0, step), SOURCE) for step in (1, 2))
    reply = await coordinator.ask(UpdateWeights(first, "interrupt", 5.0), UpdateWeightsReply)
    assert (reply.version, reply.checksum) == (Version(0, 1), first.checksum)
    coordinator.generate(1, 20)
    await coordinator.until(lambda: 1 in coordinator.finish)
    coordinator.generate(2, 900)
    await coordinator.until(lambda: 2 in coordinator.tokens)
    released = await coordinator.ask(Release(), ReleaseReply)
    assert released.released_bytes > NOMINAL_WEIGHT_BYTES
    await coordinator.until(lambda: 2 in coordinator.finish)
    coordinator.generate(3, 20)
    await coordinator.until(lambda: 3 in coordinator.finish)
    assert (coordinator.finish[2], coordinator.finish[3], coordinator.tokens[3]) == ("abort", "abort", 0)
    active = await coordinator.ask(Activate(second, 5.0), ActivateReply)
    assert (active.version, active.checksum) == (Version(0, 2), second.checksum)
    coordinator.generate(4, 20)
    await coordinator.until(lambda: 4 in coordinator.finish)
    assert (coordinator.finish[1], coordinator.finish[4]) == ("stop", "stop")


async def test_an_emulated_worker_speaks_as_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard of when its engine has started: whoever is asked for its memory before that cannot give it."""
    has_joined: list[bool] = []  # when the engine had started
    start = EmulatedEngine.start

    async def start_and_tell(engine: EmulatedEngine) -> None:
        await start(engine)
        has_joined.append(coordinator.joined.is_set())

    monkeypatch.setattr(EmulatedEngine, "start", start_and_tell)
    server = RpcServer(
        "tcp://127.0.0.1:0",
        run_id="emulated-worker-test",
        messages=Deltas | Heartbeat | UpdateWeightsReply | ReleaseReply | ActivateReply,
        queue_messages=256,
        max_frame_bytes=1 << 20,
        clock=MonotonicClock(),
    )
    async with server, asyncio.TaskGroup() as group:
        coordinator = Coordinator(server)
        listening = group.create_task(coordinator.listen())
        words = {"address": server.address, "run-id": "emulated-worker-test", "slot": 3, "incarnation": 1}
        words |= {"config": "-", "vocabulary-size": emulated_tokens.VOCABULARY_SIZE}
        options = parse("test", [str(word) for key, value in words.items() for word in (f"--{key}", value)])
        worker = group.create_task(serve(options, CONFIG, None))
        async with asyncio.timeout(LIMIT_S):
            await coordinator.joined.wait()
        assert has_joined == [False]
        await converse(coordinator)
        server.notify(PEER, Shutdown("the test is over"))
        async with asyncio.timeout(LIMIT_S):
            assert "the test is over" in await worker
        listening.cancel()


@pytest.mark.parametrize("module", ["rollout", "training"])
def test_the_process_is_light_and_knows_no_torch(module: str) -> None:
    code = (
        f"import sys, psutil, pearl.workers.{module}.emulated.worker\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(psutil.Process().memory_info().rss >> 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert int(done.stdout) < MAX_RSS_MB
