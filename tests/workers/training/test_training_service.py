"""What rank 0 answers, with a world that only records what it is told."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from training_worlds import CONFIG, make_demonstrations, make_samples

from pearl.types.messages.control import Ack, Shutdown
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
from pearl.types.weights import Snapshot, Version
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.rank_commands import Begin, Command, Progress, Step
from pearl.workers.training.service import NEWEST, Reply, TrainingService


class World:
    """Answers at once, or when ``gate`` opens."""

    def __init__(self, root: Path) -> None:
        self.commands: list[Command] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_broken = False
        self.began = asyncio.Event()  # a command waits at the closed gate
        self.progress = Progress()
        self.checkpoints = CheckpointStore(root, keep=2)
        config = msgspec.structs.replace(
            CONFIG, warm_start=msgspec.structs.replace(CONFIG.warm_start, num_demonstrations=10)
        )
        self.service = TrainingService(config, self.checkpoints, self.progress, self.execute)

    async def execute(self, command: Command) -> Reply:
        self.commands.append(command)
        if not self.gate.is_set():
            self.began.set()
        await self.gate.wait()
        if isinstance(command, Begin):
            snapshot = make_snapshot(Version(command.lineage, command.restore_step or 0))
            return StartTrainingReply(snapshot, command.restore_step is not None, {})
        if isinstance(command, Offload):
            return OffloadReply(100, {"release": 0.1})
        if isinstance(command, Restore):
            if self.is_broken:
                raise ValueError("no room")
            return RestoreReply({"restore": 0.1})
        assert isinstance(command, Step)
        return TrainStepReply(make_snapshot(Version(0, command.step + 1)), None, {}, 0.0, 0)

    async def started(self) -> "World":
        await self.service.handle(StartTraining(0, None))
        return self

    def save(self, *steps: int) -> None:
        for step in steps:
            writer = self.checkpoints.writer(step)
            writer.add("model", {"a": torch.zeros(1)})
            writer.commit(0, "")


def make_snapshot(version: Version) -> Snapshot:
    return Snapshot(version, 0, (), (), (), "")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_samples_in_pieces_and_any_order_make_a_step(world: World) -> None:
    await world.started()
    samples = make_samples(6)
    assert await world.service.handle(AddSamples(0, samples[3:])) == Ack()
    assert await world.service.handle(AddSamples(0, samples[:3])) == Ack()
    reply = await world.service.handle(TrainStep(0, 6, True))
    assert isinstance(reply, TrainStepReply)
    step = world.commands[-1]
    assert isinstance(step, Step)
    assert step.checkpoint
    assert sorted(sample.trajectory for sample in step.samples) == list(range(6))


async def test_a_repeated_sample_is_counted_and_not_doubled(world: World) -> None:
    await world.started()
    samples = make_samples(3)
    changed = msgspec.structs.replace(samples[0], reward=9.0)
    await world.service.handle(AddSamples(0, samples))
    await world.service.handle(AddSamples(0, (changed,)))
    reply = await world.service.handle(TrainStep(0, 3, False))
    assert isinstance(reply, TrainStepReply)
    assert reply.metrics["samples_repeated"] == 1
    step = world.commands[-1]
    assert isinstance(step, Step)
    assert step.samples == samples


async def test_a_step_with_other_than_its_samples_is_refused_and_can_be_completed(world: World) -> None:
    await world.started()
    samples = make_samples(3)
    await world.service.handle(AddSamples(0, samples[:2]))
    with pytest.raises(ValueError, match="step 0 is to be trained on 3 samples, 2 came"):
        await world.service.handle(TrainStep(0, 3, False))
    await world.service.handle(AddSamples(0, samples[2:]))
    assert isinstance(await world.service.handle(TrainStep(0, 3, False)), TrainStepReply)


async def test_a_step_out_of_order_is_refused(world: World) -> None:
    await world.started()
    with pytest.raises(ValueError, match="step 1 is asked for, but version 0"):
        await world.service.handle(TrainStep(1, 0, False))
    with pytest.raises(ValueError, match=r"samples for step 9, but steps 0 to 2"):
        await world.service.handle(AddSamples(9, make_samples(1)))


async def test_samples_of_the_next_step_may_come_while_one_is_trained(world: World) -> None:
    await world.started()
    await world.service.handle(AddSamples(0, make_samples(2)))
    world.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        training = tasks.create_task(world.service.handle(TrainStep(0, 2, False)))
        await world.began.wait()
        assert world.service.heartbeat().busy == "training"
        await world.service.handle(AddSamples(1, make_samples(3)))
        with pytest.raises(ValueError, match="while the world starts or works: training"):
            await world.service.handle(TrainStep(0, 2, False))
        world.gate.set()
        await training
    assert world.service.heartbeat().pending == 0
    await world.service.handle(TrainStep(1, 3, False))
    with pytest.raises(ValueError, match="samples for step 0"):
        await world.service.handle(AddSamples(0, make_samples(2)))


async def test_more_samples_than_the_batch_are_refused(world: World) -> None:
    await world.started()
    with pytest.raises(ValueError, match=r"would have 65 samples, data\.batch_size = 64"):
        await world.service.handle(AddSamples(0, make_samples(65)))


async def test_demonstrations_come_before_the_start(world: World) -> None:
    demonstrations = make_demonstrations(8)
    await world.service.handle(AddDemonstrations(demonstrations[:5]))
    await world.service.handle(AddDemonstrations(demonstrations[5:]))
    with pytest.raises(ValueError, match="num_demonstrations = 10"):
        await world.service.handle(AddDemonstrations(demonstrations))
    await world.started()
    assert world.commands == [Begin(0, None, demonstrations)]


async def test_a_world_starts_once(world: World) -> None:
    await world.started()
    with pytest.raises(ValueError, match="has been started"):
        await world.service.handle(StartTraining(1, None))


async def test_restore_of_the_newest_and_of_one_step(tmp_path: Path) -> None:
    newest, chosen = World(tmp_path / "newest"), World(tmp_path / "chosen")
    newest.save(3, 4)
    reply: Any = await newest.service.handle(StartTraining(2, NEWEST))
    assert (reply.snapshot.version, reply.restored) == (Version(2, 4), True)
    chosen.save(3, 4)
    await chosen.service.handle(StartTraining(2, 3))
    assert chosen.commands == [Begin(2, 3, ())]
    assert chosen.checkpoints.steps() == [3]  # step 4 never happened in this lineage


@pytest.mark.parametrize("step", [NEWEST, 7])
async def test_a_checkpoint_that_is_not_there_is_refused(world: World, step: int) -> None:
    with pytest.raises(ValueError, match="complete"):
        await world.service.handle(StartTraining(2, step))
    assert world.commands == []


async def test_while_the_state_is_away_samples_come_and_no_step_is_trained(world: World) -> None:
    await world.started()
    await world.service.handle(AddSamples(0, make_samples(2)))
    assert await world.service.handle(Offload()) == OffloadReply(100, {"release": 0.1})
    await world.service.handle(AddSamples(0, make_samples(4)))
    with pytest.raises(ValueError, match="step 0 cannot be trained: the training state is off its devices"):
        await world.service.handle(TrainStep(0, 4, False))
    assert await world.service.handle(Restore()) == RestoreReply({"restore": 0.1})
    reply = await world.service.handle(TrainStep(0, 4, False))
    assert isinstance(reply, TrainStepReply)


@pytest.mark.scenario("MH-02")
async def test_a_restore_that_failed_is_tried_again_before_any_step(world: World) -> None:
    await world.started()
    await world.service.handle(Offload())
    world.is_broken = True
    with pytest.raises(ValueError, match="no room"):
        await world.service.handle(Restore())
    with pytest.raises(ValueError, match="restore it first"):
        await world.service.handle(TrainStep(0, 0, False))
    world.is_broken = False
    await world.service.handle(Restore())
    await world.service.handle(TrainStep(0, 0, False))


async def test_the_state_leaves_between_steps_only(world: World) -> None:
    with pytest.raises(ValueError, match="it was not started"):
        await world.service.handle(Offload())
    await world.started()
    world.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        training = tasks.create_task(world.service.handle(TrainStep(0, 0, False)))
        await world.began.wait()
        for message in (Offload(), Restore()):
            with pytest.raises(ValueError, match="works: training"):
                await world.service.handle(message)
        world.gate.set()
        await training
        world.gate.clear()
        world.began.clear()
        leaving = tasks.create_task(world.service.handle(Offload()))
        await world.began.wait()
        assert (world.service.heartbeat().busy, world.service.heartbeat().pending) == ("offloading", 1)
        with pytest.raises(ValueError, match="works: offloading"):
            await world.service.handle(TrainStep(1, 0, False))
        world.gate.set()
        await leaving
    assert world.service.heartbeat().pending == 0


async def test_shutdown_needs_no_answer(world: World) -> None:
    assert await world.service.handle(Shutdown("over")) is None
