"""Interrupts, releases, activations and the lending of training's devices: commands and the events that answer them."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from stage import Stage, staged

from pearl.testing.fakes import FakeRollout, FakeTraining, small_config
from pearl.types import commands, events
from pearl.types.config import Config, RuntimeConfig
from pearl.types.ids import AttemptId, Incarnation, OpId, Slot, TrajectoryId
from pearl.types.messages.rollout import UpdateWeights
from pearl.types.weights import SourceLostError, SupersededVersionError, Version

SLOT, LIFE = Slot(0), Incarnation(1)


def quick_config(*, queue_messages: int = 4096) -> Config:
    runtime = RuntimeConfig(update_timeout_s=0.2, train_timeout_s=0.2, queue_messages=queue_messages)
    return msgspec.structs.replace(small_config(), runtime=runtime)


async def serve(stage: Stage) -> Version:
    """A trainer and one worker with its weights."""
    ready = await stage.start_trainer()
    await stage.start_worker(0, "local/0")
    await stage.update(0, ready)
    return ready.version


async def generate(stage: Stage, *trajectories: int) -> None:
    """Open an episode each and ask for its first turn."""
    for identity in map(TrajectoryId, trajectories):
        stage.order(commands.OpenEpisode(stage.op(), identity, False, identity, 0))
        tokens = (await stage.event(events.EpisodeOpened)).prompt_tokens
        stage.order(commands.Generate(AttemptId(stage.op()), identity, 0, SLOT, LIFE, tokens, 4, False))


async def is_held(stage: Stage, count: int) -> None:
    """Until the worker has taken so many requests, which last until they are interrupted."""
    worker = stage.cluster.groups["rollout.0.1"]
    assert isinstance(worker, FakeRollout)
    async with asyncio.timeout(10):
        while len(worker.held) < count:  # noqa: ASYNC110 - the fake's own state
            await asyncio.sleep(0.001)


async def test_an_interrupt_ends_attempts_with_what_they_made(tmp_path: Path) -> None:
    async with staged(quick_config(), tmp_path) as stage:
        stage.cluster.holds = lambda worker: True
        await serve(stage)
        await generate(stage, 3)
        await is_held(stage, 1)
        stage.order(commands.Interrupt(SLOT, LIFE))
        [delta] = (await stage.event(events.TokensStreamed)).deltas
        assert (delta.count, delta.finish) == (1, "abort")
        stage.order(commands.Interrupt(Slot(7), LIFE))  # gone: needs no telling
        stage.order(commands.Abort(AttemptId(1), Slot(7), LIFE))
        await generate(stage, 4)


@pytest.mark.scenario("PR-01")
async def test_the_last_tokens_of_a_released_worker_come_before_its_release(tmp_path: Path) -> None:
    async with staged(quick_config(queue_messages=4), tmp_path) as stage:
        stage.cluster.holds = lambda worker: True
        await serve(stage)
        await generate(stage, *range(12))
        await is_held(stage, 12)
        op = stage.op()
        stage.order(commands.ReleaseWorker(op, SLOT, LIFE, 5.0))
        released = await stage.event(events.WorkerReleased)
        assert (released.op, released.parts) == (op, {"release": 0.25})
        assert 0 <= released.seconds < 5
        kinds = stage.kinds()
        assert kinds[kinds.index("TokensStreamed") :] == ["TokensStreamed"] * 12 + ["WorkerReleased"]


@pytest.mark.scenario("MH-03")
async def test_a_worker_that_does_not_let_go_in_its_limit_is_killed(tmp_path: Path) -> None:
    async def never(worker: FakeRollout) -> None:
        await asyncio.sleep(60)

    async with staged(quick_config(), tmp_path) as stage:
        stage.cluster.before_release = never
        await serve(stage)
        stage.order(commands.ReleaseWorker(stage.op(), SLOT, LIFE, 0.1))
        lost = await stage.event(events.WorkerLost)
        assert lost.reason == "did not release its memory within elastic.release_limit_s = 0.1 s"
        assert "rollout.0.1" not in stage.cluster.groups
        assert "WorkerReleased" not in stage.kinds()


async def test_a_refused_release_ends_the_worker_with_its_reason(tmp_path: Path) -> None:
    async def broken(worker: FakeRollout) -> None:
        raise ValueError("the allocator is stuck")

    async with staged(quick_config(), tmp_path) as stage:
        stage.cluster.before_release = broken
        await serve(stage)
        stage.order(commands.ReleaseWorker(stage.op(), SLOT, LIFE, 5.0))
        assert "the allocator is stuck" in (await stage.event(events.WorkerLost)).reason


async def test_an_activation_is_proven_with_its_parts_or_fails(tmp_path: Path) -> None:
    async with staged(quick_config(), tmp_path) as stage:
        version = await serve(stage)
        stage.order(commands.ReleaseWorker(stage.op(), SLOT, LIFE, 5.0))
        await stage.event(events.WorkerReleased)
        op = stage.op()
        stage.order(commands.ActivateWorker(op, SLOT, LIFE, version))
        proven = await stage.event(events.WeightsVerified)
        assert (proven.op, proven.version, proven.checksum) == (op, version, f"sum-{version}")
        assert proven.parts == {"load": 0.5}
        stage.order(commands.ActivateWorker(stage.op(), SLOT, LIFE, Version(0, 9)))
        assert (await stage.event(events.WeightsFailed)).reason == "0:9 is superseded, the newest is 0:0"
        stage.order(commands.ActivateWorker(stage.op(), Slot(5), LIFE, version))
        assert "rollout.5.1 is not connected" in (await stage.event(events.WeightsFailed)).reason


@pytest.mark.scenario("WS-12")
async def test_a_superseded_version_is_told_as_such(tmp_path: Path) -> None:
    class Late(FakeRollout):
        async def handle(self, message: Any) -> Any:
            if isinstance(message, UpdateWeights):
                raise SupersededVersionError(f"{message.snapshot.version} was superseded by 0:1")
            return await super().handle(message)

    async with staged(quick_config(), tmp_path) as stage:
        stage.cluster.kinds["rollout"] = Late
        ready = await stage.start_trainer()
        await stage.start_worker(0, "local/0")
        stage.order(commands.UpdateWeights(stage.op(), SLOT, LIFE, ready.version, "interrupt"))
        failed = await stage.event(events.WeightsFailed)
        assert failed.superseded
        assert "superseded by 0:1" in failed.reason


class Cut(FakeRollout):
    """Finds no source, which is dead when the test says so."""

    kills: ClassVar[tuple[str, ...]] = ()

    async def handle(self, message: Any) -> Any:
        if isinstance(message, UpdateWeights):
            for group in self.kills:
                self.cluster.kill(group)
            raise SourceLostError("its process ended")
        return await super().handle(message)


class NoticedLate(FakeTraining):
    """torchrun takes its time to see that a rank is dead."""

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await asyncio.sleep(0.3)


async def test_a_dead_world_is_known_before_the_updates_that_fail_for_it(tmp_path: Path) -> None:
    class Bereft(Cut):
        kills = ("training.0.1",)

    async with staged(quick_config(), tmp_path) as stage:
        stage.cluster.kinds |= {"rollout": Bereft, "training": NoticedLate}
        ready = await stage.start_trainer()
        await stage.start_worker(0, "local/0")
        stage.order(commands.UpdateWeights(stage.op(), SLOT, LIFE, ready.version, "interrupt"))
        assert "its process ended" in (await stage.event(events.WeightsFailed)).reason
        assert stage.kinds().index("TrainerLost") < stage.kinds().index("WeightsFailed")


async def test_a_worker_that_is_cut_off_from_a_world_that_lives_is_told_of(tmp_path: Path) -> None:
    async with staged(quick_config(), tmp_path) as stage:
        stage.cluster.kinds["rollout"] = Cut
        ready = await stage.start_trainer()
        await stage.start_worker(0, "local/0")
        stage.order(commands.UpdateWeights(stage.op(), SLOT, LIFE, ready.version, "interrupt"))
        assert "its process ended" in (await stage.event(events.WeightsFailed)).reason
        assert "TrainerLost" not in stage.kinds()


async def test_training_lends_its_devices_and_takes_them_back(tmp_path: Path) -> None:
    async with staged(quick_config(), tmp_path) as stage:
        await serve(stage)
        away, home = stage.op(), stage.op()
        stage.order(commands.OffloadTraining(away, LIFE))
        offloaded = await stage.event(events.TrainingOffloaded)
        assert offloaded.op == away
        assert offloaded.parts == {"backup": 0.125}
        stage.order(commands.RestoreTraining(home, LIFE))
        restored = await stage.event(events.TrainingRestored)
        assert (restored.op, restored.parts) == (home, {"restore": 0.0625})
        stage.order(commands.OffloadTraining(stage.op(), Incarnation(9)))  # its loss was told: nothing to do
        stage.order(commands.StopTrainer(LIFE, 0.0, "wanted"))
        assert (await stage.event(events.TrainerLost)).incarnation == LIFE


async def test_training_that_cannot_be_moved_is_replaced(tmp_path: Path) -> None:
    def broken(world: FakeTraining) -> None:
        raise ValueError("3 bytes are still there")

    async with staged(quick_config(), tmp_path) as stage:
        stage.cluster.before_offload = broken
        await serve(stage)
        stage.order(commands.OffloadTraining(stage.op(), LIFE))
        assert "Offload failed: ValueError: 3 bytes" in (await stage.event(events.TrainerLost)).reason


async def test_a_role_is_set_or_the_worker_replaced(tmp_path: Path) -> None:
    async with staged(quick_config(), tmp_path) as stage:
        await serve(stage)
        op = stage.op()
        stage.order(commands.SetRole(op, SLOT, LIFE, "decode"))
        assert (await stage.event(events.RoleSet)).op == op
        stage.order(commands.SetRole(OpId(1), Slot(4), LIFE, "decode"))
        stage.order(commands.StopWorker(SLOT, LIFE, 0.0, "wanted"))
        assert (await stage.event(events.WorkerLost)).slot == SLOT


async def test_iterations_of_the_engine_reach_the_core_as_sums(tmp_path: Path) -> None:
    async with staged(quick_config(), tmp_path) as stage:
        await serve(stage)
        await generate(stage, 3)
        sums = (await stage.event(events.TokensStreamed)).iterations
        assert sums is not None
        assert (sums.count, sums.seconds, sums.decoding, sums.context) == (1, 0.01, 1.0, 4.0)
