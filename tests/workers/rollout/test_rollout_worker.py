"""A rollout worker as the coordinator sees it: a real server, a real peer, a mapped snapshot; one process."""

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_support import VOCABULARY, Answer, gather, ids, reference

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.errors import RemoteError
from pearl.runtime.inbound import Notification, PeerJoined
from pearl.runtime.rpc_server import RpcServer
from pearl.types.config import Config, ModelConfig, RolloutConfig, RuntimeConfig
from pearl.types.messages.control import Ack, Heartbeat, Shutdown
from pearl.types.messages.rollout import (
    Abort,
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
from pearl.types.weights import Snapshot, UpdateMode, Version
from pearl.workers.rollout.protocol import Delta
from pearl.workers.rollout.worker import make_engine, serve
from pearl.workers.weight_transfer.checksum import canonical_tensors
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

RUN_ID = "rollout-worker-test"
PEER = "rollout.3.1"
LIMIT_S = 20.0
CONFIG = Config(
    model=ModelConfig(initializer_range=0.2, device="cpu"),
    runtime=RuntimeConfig(heartbeat_period_s=0.05, lease_s=LIMIT_S, update_timeout_s=LIMIT_S),
)


class Coordinator:
    """Tells and asks the worker, and keeps what it streams."""

    def __init__(self, server: RpcServer, store: SnapshotStore) -> None:
        self.server = server
        self.store = store
        self.found: dict[int, Answer] = {}
        self.frames: list[Deltas] = []
        self.heartbeats: list[Heartbeat] = []
        self.joined = asyncio.Event()
        self._told = asyncio.Event()

    async def listen(self) -> None:
        while True:
            match await self.server.receive():
                case PeerJoined():
                    self.joined.set()
                case Notification(message=Deltas() as frame):
                    self._take(frame)
                case Notification(message=Heartbeat() as heartbeat):
                    self.heartbeats.append(heartbeat)
            self._told.set()

    def _take(self, frame: Deltas) -> None:
        assert frame.sequence == len(self.frames)
        self.frames.append(frame)
        for delta in frame.deltas:
            tokens = np.frombuffer(delta.ids, "<i4").tolist()
            logprobs = np.frombuffer(delta.logprobs, "<f4").tolist()
            runs = list(delta.runs)
            entry = Delta(
                delta.attempt, tokens, logprobs, runs, delta.prefilled_tokens, delta.finish, delta.error
            )
            gather(self.found, entry)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._told.clear()
                await self._told.wait()

    async def finished(self, *attempts: int) -> dict[int, Answer]:
        await self.until(lambda: all(a in self.found and self.found[a].finish for a in attempts))
        return self.found

    async def produced(self, count: int, *attempts: int) -> None:
        await self.until(lambda: all(a in self.found and len(self.found[a].ids) >= count for a in attempts))

    def generate(
        self, attempt: int, count: int, seed: int | None = None, context: bytes | None = None
    ) -> None:
        data = ids(attempt, 12).tobytes() if context is None else context
        params = SamplingParams(count, 1.0, ())
        self.server.notify(PEER, Generate(attempt, attempt, data, params, attempt if seed is None else seed))

    def publish(self, number: int) -> Snapshot:
        return self.store.publish(Version(0, number), canonical_tensors(reference(number % 3)))

    async def update(self, snapshot: Snapshot, mode: UpdateMode = "interrupt") -> UpdateWeightsReply:
        message = UpdateWeights(snapshot, mode, 5.0)
        return await self.server.call(PEER, message, deadline_s=LIMIT_S, reply_type=UpdateWeightsReply)

    async def release(self) -> ReleaseReply:
        return await self.server.call(PEER, Release(), deadline_s=LIMIT_S, reply_type=ReleaseReply)

    async def activate(self, snapshot: Snapshot) -> ActivateReply:
        return await self.server.call(
            PEER, Activate(snapshot, 5.0), deadline_s=LIMIT_S, reply_type=ActivateReply
        )


@asynccontextmanager
async def working(config: Config = CONFIG) -> AsyncIterator[Coordinator]:
    torch.set_num_threads(1)
    server = RpcServer(
        "tcp://127.0.0.1:0",
        run_id=RUN_ID,
        messages=Deltas | Heartbeat | Ack | UpdateWeightsReply | ReleaseReply | ActivateReply,
        queue_messages=256,
        max_frame_bytes=1 << 20,
        clock=MonotonicClock(),
    )
    async with server, asyncio.TaskGroup() as group:
        store = SnapshotStore(1, 0, socket.gethostname(), 1 << 16)
        coordinator = Coordinator(server, store)
        listening = group.create_task(coordinator.listen())
        options = argparse.Namespace(
            address=server.address,
            run_id=RUN_ID,
            slot=3,
            incarnation=1,
            vocabulary_size=VOCABULARY,
            role="colocated",
        )
        worker = group.create_task(serve(options, config, None))
        async with asyncio.timeout(LIMIT_S):
            await coordinator.joined.wait()
        try:
            yield coordinator
            server.notify(PEER, Shutdown("the test is over"))
            async with asyncio.timeout(LIMIT_S):
                assert "the test is over" in await worker
        finally:
            worker.cancel()
            listening.cancel()
            store.close()


async def test_requests_are_streamed_in_frames_and_end_once() -> None:
    async with working() as coordinator:
        snapshot = coordinator.publish(1)
        reply = await coordinator.update(snapshot)
        assert (reply.version, reply.checksum) == (Version(0, 1), snapshot.checksum)
        for attempt in range(6):
            coordinator.generate(attempt, 40)
        found = await coordinator.finished(*range(6))
        assert all((len(a.ids), a.finish, a.prefilled) == (40, "length", 12) for a in found.values())
        assert sum(len(frame.deltas) for frame in coordinator.frames) < 6 * 40, "one frame a token"
        assert sum(stat.prefill_tokens for frame in coordinator.frames for stat in frame.iterations) == 72
        await coordinator.until(lambda: coordinator.heartbeats and coordinator.heartbeats[-1].pending == 0)
        assert coordinator.heartbeats[-1].progress > 0


async def test_an_interrupting_update_sends_what_was_made_before_its_answer() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        for attempt in range(3):
            coordinator.generate(attempt, 4000)
        await coordinator.produced(5, 0, 1, 2)
        await coordinator.update(coordinator.publish(2))
        # Frames go the same way as the answer, in order; they are only not taken out of the inbox yet.
        found = await coordinator.finished(0, 1, 2)
        assert all(answer.finish == "abort" for answer in found.values())
        assert all(run.version == Version(0, 1) for answer in found.values() for run in answer.runs)
        coordinator.generate(5, 4)
        runs = (await coordinator.finished(5))[5].runs
        assert {(run.version, run.kv_version) for run in runs} == {(Version(0, 2), Version(0, 2))}


@pytest.mark.scenario("PR-05")
async def test_an_update_in_place_marks_each_token_with_its_version() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        coordinator.generate(1, 3000)
        await coordinator.produced(5, 1)
        await coordinator.update(coordinator.publish(2), "in_place")
        await coordinator.until(lambda: coordinator.found[1].runs[-1].version == Version(0, 2))
        await coordinator.update(coordinator.publish(3), "in_place")
        await coordinator.until(lambda: coordinator.found[1].runs[-1].version == Version(0, 3))
        coordinator.server.notify(PEER, Abort(1))
        answer = (await coordinator.finished(1))[1]
        versions = [run.version.step for run in answer.runs]
        assert versions == sorted(versions)
        assert set(versions) == {1, 2, 3}
        assert {run.kv_version for run in answer.runs} == {Version(0, 1)}


async def test_a_draining_update_lets_requests_finish_and_takes_none() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        coordinator.generate(1, 300)
        await coordinator.produced(1, 1)
        snapshot = coordinator.publish(2)
        async with asyncio.TaskGroup() as group:
            update = group.create_task(coordinator.update(snapshot, "drain"))
            beats = coordinator.heartbeats
            await coordinator.until(lambda: (beats and beats[-1].busy == "updating") or update.done())
            coordinator.generate(2, 5)
        found = await coordinator.finished(1, 2)
        assert (len(found[1].ids), found[1].finish) == (300, "length")
        assert {run.version for run in found[1].runs} == {Version(0, 1)}
        assert (found[2].ids, found[2].finish) == ([], "abort")


@pytest.mark.scenario("WS-05")
async def test_a_failed_update_names_worker_and_tensor_and_the_next_one_heals_it() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        good = coordinator.publish(2)
        spec = good.tensors[1]
        wrong = type(spec)(spec.name, spec.dtype, (1, *spec.shape), spec.offset, spec.num_bytes)
        bad = msgspec.structs.replace(good, tensors=(good.tensors[0], wrong, *good.tensors[2:]))
        with pytest.raises(RemoteError, match=rf"{PEER}.*{spec.name}"):
            await coordinator.update(bad)
        coordinator.generate(1, 4)
        reply = await coordinator.update(good)
        assert reply.checksum == good.checksum
        # The request came while nothing could be served: it either waited or was interrupted with nothing made.
        assert {run.version for run in (await coordinator.finished(1))[1].runs} <= {Version(0, 2)}


@pytest.mark.scenario("WS-05")
async def test_weights_other_than_the_published_ones_are_not_served() -> None:
    async with working() as coordinator:
        with pytest.raises(RemoteError, match=f"{PEER}.*checksum"):
            await coordinator.update(msgspec.structs.replace(coordinator.publish(1), checksum="0" * 32))
        coordinator.generate(1, 4)
        await coordinator.update(coordinator.publish(2), "in_place")
        assert {run.version for run in (await coordinator.finished(1))[1].runs} == {Version(0, 2)}


async def test_a_snapshot_that_cannot_be_had_leaves_the_old_version_at_work() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        coordinator.generate(1, 200)
        await coordinator.produced(1, 1)
        stale = coordinator.publish(2)
        coordinator.publish(3)
        coordinator.publish(4)
        with pytest.raises(RemoteError, match=PEER) as invalid_reason:
            await coordinator.update(stale)
        assert invalid_reason.value.kind == "SupersededVersionError"
        answer = (await coordinator.finished(1))[1]
        assert (len(answer.ids), answer.finish) == (200, "length")
        assert {run.version for run in answer.runs} == {Version(0, 1)}


@pytest.mark.scenario("PR-04")
async def test_an_attempt_sent_twice_is_answered_once() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        coordinator.generate(1, 50)
        coordinator.generate(1, 50)
        coordinator.generate(2, 60)
        found = await coordinator.finished(1, 2)
        assert (len(found[1].ids), len(found[2].ids)) == (50, 60)
        coordinator.generate(1, 50)
        coordinator.generate(3, 5)
        await coordinator.finished(3)
        assert len(found[1].ids) == 50


async def test_bad_requests_end_alone() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        coordinator.generate(1, 5, context=b"\1\2\3")
        coordinator.generate(2, 5, context=np.array([VOCABULARY], "<i4").tobytes())
        coordinator.generate(3, 5)
        found = await coordinator.finished(1, 2, 3)
        assert [found[a].finish for a in (1, 2, 3)] == ["error", "error", "length"]


async def test_a_worker_that_cannot_be_built_ends_with_the_reason() -> None:
    broken = Config(model=ModelConfig(path="/no/such/model", device="cpu"))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with working(broken):
            await asyncio.sleep(LIMIT_S)
    found = caught.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert "model.path = '/no/such/model'" in str(found)


def test_settings_that_this_engine_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.gpus_per_worker = 2"):
        make_engine(Config(rollout=RolloutConfig(gpus_per_worker=2)), VOCABULARY, None)
    with pytest.raises(ValueError, match=r"rollout\.engine"):
        make_engine(Config(rollout=RolloutConfig(engine="emulated")), VOCABULARY, None)
