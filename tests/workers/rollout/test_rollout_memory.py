"""A rollout worker that lends its device: interrupted, released, activated, over a real server and peer."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from engine_support import ids
from test_rollout_worker import CONFIG, PEER, Coordinator, working

from pearl.runtime.errors import RemoteError
from pearl.types.config import ElasticConfig
from pearl.types.messages.control import Ack
from pearl.types.messages.rollout import Interrupt
from pearl.types.weights import Version
from pearl.workers.memory_offload.host_saver import HostSaver
from pearl.workers.memory_offload.pages import Pages
from pearl.workers.rollout.torch_engine import memory
from pearl.workers.rollout.torch_engine.core import EngineCore


class Gate:
    """Holds the engine's thread inside a call until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        original = getattr(EngineCore, method)
        self.reached = threading.Event()
        self.opened = threading.Event()

        def held(core: EngineCore, *arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(20.0)
            return original(core, *arguments)

        monkeypatch.setattr(EngineCore, method, held)

    async def wait(self) -> None:
        await asyncio.to_thread(self.reached.wait, 20.0)


async def test_output_after_an_activation_is_that_before_the_release_under_the_same_weights() -> None:
    async with working() as coordinator:
        snapshot = coordinator.publish(1)
        await coordinator.update(snapshot)
        context = ids(7, 12).tobytes()
        coordinator.generate(1, 40, seed=9, context=context)
        before = (await coordinator.finished(1))[1]
        for attempt in (2, 3):
            released = await coordinator.release()
            assert released.released_bytes > 1 << 18
            assert set(released.parts) == {"interrupt", "release", "verify"}
            reply = await coordinator.activate(snapshot)
            assert (reply.version, reply.checksum) == (Version(0, 1), snapshot.checksum)
            assert set(reply.parts) == {"weights_memory", "transfer", "load", "kv_memory"}
            assert all(seconds >= 0 for seconds in reply.parts.values())
            coordinator.generate(attempt, 40, seed=9, context=context)
            after = (await coordinator.finished(attempt))[attempt]
            assert (after.ids, after.logprobs, after.prefilled) == (before.ids, before.logprobs, 12)


async def test_a_release_ends_every_attempt_with_what_it_made_before_its_answer() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        for attempt in range(3):
            coordinator.generate(attempt, 4000)
        await coordinator.produced(5, 0, 1, 2)
        await coordinator.release()
        # Frames go the same way as the answer, in order; they are only not taken out of the inbox yet.
        found = await coordinator.finished(0, 1, 2)
        assert all(answer.finish == "abort" and len(answer.ids) >= 5 for answer in found.values())


@pytest.mark.scenario("MH-03")
async def test_a_request_that_reaches_a_released_worker_ends_at_once_with_nothing() -> None:
    async with working() as coordinator:
        snapshot = coordinator.publish(1)
        await coordinator.update(snapshot)
        await coordinator.release()
        for attempt in range(5):
            coordinator.generate(attempt, 50)
        found = await coordinator.finished(*range(5))
        assert {(a.finish, len(a.ids), a.prefilled) for a in found.values()} == {("abort", 0, 0)}
        with pytest.raises(RemoteError, match=f"{PEER}.*its memory is released; activate it"):
            await coordinator.update(snapshot)
        await coordinator.activate(snapshot)
        coordinator.generate(9, 5)
        assert (await coordinator.finished(9))[9].finish == "length"


@pytest.mark.scenario("MH-03")
async def test_requests_in_a_hundred_borrows_and_returns_keep_what_was_made() -> None:
    async with working() as coordinator:
        snapshot = coordinator.publish(1)
        await coordinator.activate(snapshot)
        attempt = 0
        for _ in range(100):
            first = attempt
            for _ in range(5):
                coordinator.generate(attempt, 2000)
                attempt += 1
            await coordinator.release()
            coordinator.generate(attempt, 2000)
            attempt += 1
            await coordinator.activate(snapshot)
            found = await coordinator.finished(*range(first, attempt))
            assert {found[a].finish for a in range(first, attempt)} == {"abort"}
            assert not found[attempt - 1].ids
        assert all(run.version == Version(0, 1) for a in coordinator.found.values() for run in a.runs)


async def test_a_worker_that_never_had_weights_is_released_and_activated() -> None:
    async with working() as coordinator:
        await coordinator.release()
        await coordinator.release()
        snapshot = coordinator.publish(2)
        assert (await coordinator.activate(snapshot)).checksum == snapshot.checksum
        coordinator.generate(1, 5)
        assert (await coordinator.finished(1))[1].finish == "length"


async def test_a_worker_that_serves_is_activated_with_a_newer_version() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        coordinator.generate(1, 4000)
        await coordinator.produced(3, 1)
        await coordinator.activate(coordinator.publish(2))
        coordinator.generate(2, 5)
        found = await coordinator.finished(1, 2)
        assert (found[1].finish, found[2].finish) == ("abort", "length")
        assert {run.version for run in found[2].runs} == {Version(0, 2)}


@pytest.mark.parametrize("step", ["restore", "begin_update", "update_bucket", "end_update"])
async def test_a_release_cancels_an_activation_at_its_next_step(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with working() as coordinator:
        snapshot = coordinator.publish(1)
        await coordinator.release()
        with monkeypatch.context() as patch:
            gate = Gate(patch, step)
            async with asyncio.TaskGroup() as group:
                activation = group.create_task(failing(coordinator.activate(snapshot)))
                await gate.wait()
                await busy(coordinator, "activating")
                coordinator.generate(1, 5)
                release = group.create_task(coordinator.release())
                await activation  # answered while the engine still hangs in that step
                gate.opened.set()
            assert "a release came before it was done" in activation.result()
            assert release.result().released_bytes >= 0
        assert (await coordinator.finished(1))[1].finish == "abort"
        coordinator.generate(2, 5)
        assert (await coordinator.finished(2))[2].finish == "abort"
        assert (await coordinator.activate(snapshot)).checksum == snapshot.checksum


async def test_a_release_cancels_an_update_under_way() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        coordinator.generate(1, 4000)
        await coordinator.produced(1, 1)
        snapshot = coordinator.publish(2)
        async with asyncio.TaskGroup() as group:
            update = group.create_task(failing(coordinator.update(snapshot, "drain")))
            await busy(coordinator, "updating")
            await coordinator.release()
        assert f"{PEER}: {snapshot.version} was not taken: a release came" in update.result()
        assert (await coordinator.finished(1))[1].finish == "abort"


async def test_an_activation_that_fails_leaves_the_worker_released() -> None:
    async with working() as coordinator:
        await coordinator.release()
        good = coordinator.publish(1)
        bad = msgspec.structs.replace(good, checksum="0" * 32)
        assert "checksum" in await failing(coordinator.activate(bad))
        coordinator.generate(1, 5)
        assert (await coordinator.finished(1))[1].finish == "abort"
        assert (await coordinator.release()).released_bytes == 0, "it was released by the failure"
        await coordinator.activate(good)
        coordinator.generate(2, 5)
        assert (await coordinator.finished(2))[2].finish == "length"


@pytest.mark.scenario("MH-02", "MH-08")
async def test_without_room_an_activation_fails_naming_it_and_nothing_is_half_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 1 << 40
    monkeypatch.setattr(memory, "saver_for", lambda device: HostSaver(free_bytes=lambda: free))
    async with working() as coordinator:
        snapshot = coordinator.publish(1)
        await coordinator.update(snapshot)
        await coordinator.release()
        free = 1024
        error = await failing(coordinator.activate(snapshot))
        assert f"{PEER}: {snapshot.version} was not activated: weights: " in error
        assert "1024 are free; whoever has the memory must release it first" in error
        coordinator.generate(1, 5)
        assert (await coordinator.finished(1))[1].finish == "abort"
        free = 1 << 40
        await coordinator.activate(snapshot)
        coordinator.generate(2, 5)
        assert (await coordinator.finished(2))[2].finish == "length"


@pytest.mark.scenario("MH-01")
async def test_a_release_that_frees_nothing_is_answered_by_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep(pages: Pages) -> None:
        pass

    monkeypatch.setattr(memory, "saver_for", lambda device: HostSaver(drop_pages=keep))
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        error = await failing(coordinator.release())
        assert f"{PEER}: not released: weights: " in error
        assert "are still in memory" in error
        coordinator.generate(1, 5)
        assert (await coordinator.finished(1))[1].finish == "abort", "no stage-released worker serves"


async def test_a_release_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(CONFIG, elastic=ElasticConfig(release_limit_s=0.05))
    async with working(config) as coordinator:
        with monkeypatch.context() as patch:
            gate = Gate(patch, "release")
            assert "releasing took over 0.05 s" in await failing(coordinator.release())
            gate.opened.set()


@pytest.mark.scenario("PR-01")
async def test_an_interrupt_ends_everything_and_the_worker_serves_on() -> None:
    async with working() as coordinator:
        await coordinator.update(coordinator.publish(1))
        for attempt in range(4):
            coordinator.generate(attempt, 3000)
        await coordinator.produced(5, 0, 1, 2, 3)
        coordinator.server.notify(PEER, Interrupt())
        coordinator.generate(9, 6)
        found = await coordinator.finished(0, 1, 2, 3, 9)
        assert [found[a].finish for a in (0, 1, 2, 3)] == ["abort"] * 4
        assert all(len(found[a].ids) == len(found[a].logprobs) >= 5 for a in (0, 1, 2, 3))
        assert (len(found[9].ids), found[9].finish) == (6, "length")
        answer = await coordinator.server.call(PEER, Interrupt(), deadline_s=5.0, reply_type=Ack)
        assert answer == Ack()


async def failing(call: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        await call
    return str(caught.value)


async def busy(coordinator: Coordinator, doing: str) -> None:
    await coordinator.until(lambda: coordinator.heartbeats and coordinator.heartbeats[-1].busy == doing)
