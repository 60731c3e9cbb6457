"""Real prefill and decode worker processes under a real server: kill -9 of either stage, and roles set by message."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_support import VOCABULARY, greedy_reference, ids, ready_core, reference, request, run
from pd_support import send, stage, working

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.errors import RemoteError
from pearl.runtime.inbound import Notification, PeerJoined
from pearl.runtime.rpc_server import RpcServer
from pearl.types.config import Config, ElasticConfig, ModelConfig, RuntimeConfig
from pearl.types.messages.control import Heartbeat
from pearl.types.messages.rollout import (
    AttemptDelta,
    Deltas,
    Generate,
    SetRole,
    SetRoleReply,
    UpdateWeights,
    UpdateWeightsReply,
)
from pearl.types.plan import Role
from pearl.types.weights import Version
from pearl.workers.rollout.protocol import GenerateRequest
from pearl.workers.weight_transfer.checksum import canonical_tensors
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

RUN_ID = "pd-workers-test"
START_LIMIT_S = 90.0
LIMIT_S = 20.0
FAILOVER_S = 5.0
CONFIG = Config(
    model=ModelConfig(initializer_range=0.2, device="cpu"),
    runtime=RuntimeConfig(lease_s=LIMIT_S, update_timeout_s=LIMIT_S),
    elastic=ElasticConfig(pd="adaptive"),
)
ANSWER = 8


def name_of(slot: int) -> str:
    return f"rollout.{slot}.1"


@dataclass
class PairStage:
    """What one worker said of one attempt."""

    ids: list[int] = field(default_factory=list)
    prefilled: int = 0
    finish: str | None = None
    error: str = ""

    def add(self, delta: AttemptDelta) -> None:
        self.ids += np.frombuffer(delta.ids, "<i4").tolist()
        self.prefilled += delta.prefilled_tokens
        self.finish, self.error = delta.finish, delta.error


class Fleet:
    def __init__(self, server: RpcServer, store: SnapshotStore) -> None:
        self.server = server
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.stages: dict[tuple[int, int], PairStage] = {}  # by slot and attempt
        self._store = store
        self._told = asyncio.Event()

    async def listen(self) -> None:
        while True:
            match await self.server.receive():
                case Notification(peer=peer, message=Deltas() as frame):
                    for delta in frame.deltas:
                        key = int(peer.split(".")[1]), delta.attempt
                        self.stages.setdefault(key, PairStage()).add(delta)
                    self._told.set()
                case PeerJoined():
                    self._told.set()

    async def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                self._told.clear()
                await self._told.wait()

    async def start(self, directory: Path, *roles: Role) -> None:
        config = directory / "config.json"
        config.write_bytes(msgspec.json.encode(CONFIG))
        for slot, role in enumerate(roles):
            arguments = ["--address", self.server.address, "--run-id", RUN_ID, "--incarnation", "1"]
            arguments += ["--slot", str(slot), "--config", str(config), "--vocabulary-size", str(VOCABULARY)]
            self.processes[slot] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pearl.workers.rollout.worker", *arguments, "--role", role,
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        await self.until(lambda: len(self.server.peers()) == len(roles), START_LIMIT_S)
        snapshot = self._store.publish(Version(0, 1), canonical_tensors(reference(1)))
        for slot in self.processes:
            message = UpdateWeights(snapshot, "interrupt", LIMIT_S)
            await self.server.call(
                name_of(slot), message, deadline_s=START_LIMIT_S, reply_type=UpdateWeightsReply
            )

    def send(self, slot: int, request: GenerateRequest, pair: str) -> None:
        context = request.ids.astype("<i4").tobytes()
        self.server.notify(
            name_of(slot),
            Generate(request.attempt, request.attempt, context, request.params, request.seed, pair),
        )

    def kv_address(self, slot: int) -> str:
        return self.server.hello(name_of(slot)).kv_address

    async def kill(self, slot: int) -> None:
        process = self.processes.pop(slot)
        process.kill()
        await process.wait()
        self.server.drop(name_of(slot), "killed")

    async def set_role(self, slot: int, role: Role, drain_limit_s: float = LIMIT_S) -> SetRoleReply:
        message = SetRole(role, drain_limit_s)
        return await self.server.call(name_of(slot), message, deadline_s=LIMIT_S, reply_type=SetRoleReply)


@asynccontextmanager
async def fleet(directory: Path, *roles: Role) -> AsyncIterator[Fleet]:
    server = RpcServer(
        "tcp://127.0.0.1:0",
        run_id=RUN_ID,
        messages=Deltas | Heartbeat | UpdateWeightsReply | SetRoleReply,
        queue_messages=256,
        max_frame_bytes=1 << 20,
        clock=MonotonicClock(),
    )
    async with server, asyncio.TaskGroup() as group:
        store = SnapshotStore(1, 0, socket.gethostname(), 1 << 16)
        found = Fleet(server, store)
        listening = group.create_task(found.listen())
        try:
            await found.start(directory, *roles)
            yield found
        finally:
            for process in found.processes.values():
                process.kill()
                await process.wait()
            listening.cancel()
            store.close()


@pytest.mark.timeout(180)
@pytest.mark.scenario("PD-01")
async def test_kill_9_of_a_prefill_and_of_a_decode_worker(tmp_path: Path) -> None:
    attempts = range(10)
    contexts = [ids(attempt, 1500) for attempt in attempts]
    async with (
        fleet(tmp_path, "prefill", "decode") as found,
        working("prefill", "decode") as (prefill, decode),
    ):
        # The prefill worker dies with some handed over and others not.
        for attempt in attempts:
            whole = request(attempt, contexts[attempt], ANSWER, temperature=0.0)
            await decode.engine.generate(stage(whole, name_of(0)), decode.emit)
            found.send(0, whole, decode.address)
        await found.until(lambda: any(slot == 0 for slot, _ in found.stages))
        await found.kill(0)
        async with asyncio.timeout(FAILOVER_S):
            await decode.ended(*attempts)
        moved = [a for a in attempts if decode.found[a].finish == "abort"]
        assert moved, "all was over before the kill"
        assert all(decode.found[a].ids == [] and decode.found[a].error for a in moved)
        assert await decode.is_clean()
        # They go on elsewhere; there the decode worker dies under them.
        for attempt in moved:
            whole = request(100 + attempt, contexts[attempt], ANSWER, temperature=0.0)
            found.send(1, whole, prefill.name)
            await prefill.engine.generate(stage(whole, found.kv_address(1)), prefill.emit)
        await prefill.until(lambda: bool(prefill.over))
        await found.kill(1)
        async with asyncio.timeout(FAILOVER_S):
            await prefill.ended(*[100 + a for a in moved])
        assert any(prefill.found[100 + a].finish == "abort" for a in moved)
        for attempt in moved:  # also those of which the dead worker had said something: they are made again
            await send(prefill, decode, 200 + attempt, contexts[attempt], ANSWER)
        await decode.ended(*[200 + a for a in moved])
        wholes = [request(a, contexts[a], ANSWER, temperature=0.0) for a in attempts]
        alone = run(ready_core(), *wholes)
        for attempt in attempts:
            end = decode.found[attempt + 200 if attempt in moved else attempt]
            assert end.ids == alone[attempt].ids
            # What was whole when the decode worker died is in the cache still.
            if attempt in moved and prefill.found[100 + attempt].prefilled == 1499:
                assert prefill.found[200 + attempt].prefilled == 0
        assert await prefill.is_clean()
        assert await decode.is_clean()


@pytest.mark.timeout(120)
@pytest.mark.scenario("PD-08")
async def test_a_role_is_set_by_message_drained_first(tmp_path: Path) -> None:
    async with fleet(tmp_path, "colocated") as found, working("decode") as (decode,):
        assert (await found.set_role(0, "prefill")).role == "prefill"
        context = ids(1, 40)
        for attempt in (1, 2):
            whole = request(attempt, context, ANSWER, temperature=0.0)
            if attempt == 2:  # granted only when the engine plans again
                await decode.engine.pause("in_place")
            await decode.engine.generate(stage(whole, name_of(0)), decode.emit)
            found.send(0, whole, decode.address)
            if attempt == 1:
                assert (await decode.ended(1))[1].ids == greedy_reference(reference(1), context, ANSWER)
        invalid_reason = r"rollout\.0\.1: stays prefill: 1 requests still run after 0\.2 s of draining"
        with pytest.raises(RemoteError, match=invalid_reason):
            await found.set_role(0, "colocated", drain_limit_s=0.2)
        await decode.engine.continue_generation()
        await decode.ended(2)
        assert (await found.set_role(0, "colocated")).role == "colocated"
        found.send(0, request(3, context, ANSWER), decode.address)
        await found.until(lambda: (0, 3) in found.stages)
        assert found.stages[0, 3].finish == "abort"
        found.send(0, request(4, context, ANSWER, temperature=0.0), "")
        await found.until(lambda: (0, 4) in found.stages and found.stages[0, 4].finish is not None)
        assert found.stages[0, 4].ids == greedy_reference(reference(1), context, ANSWER)
        assert found.stages[0, 4].prefilled == 40, "KV from before the switch"
