"""The emulated training world as the coordinator sees it, through the same service as the real one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.testing.manual_clock import ManualClock
from pearl.types.config import Config, DataConfig, EmulatedConfig
from pearl.types.messages.training import (
    AddSamples,
    Offload,
    OffloadReply,
    Restore,
    RestoreReply,
    Sample,
    StartTraining,
    StartTrainingReply,
    TrainStep,
    TrainStepReply,
)
from pearl.types.weights import Version
from pearl.workers.emulated_model import checksum_of, image_of
from pearl.workers.training.emulated.checkpoints import EmulatedCheckpoints
from pearl.workers.training.emulated.world import NOMINAL_STATE_BYTES, EmulatedWorld
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.service import TrainingService

CONFIG = Config(
    data=DataConfig(batch_size=2, group_size=2),
    emulated=EmulatedConfig(start_seconds=0.5, train_seconds=2.0, noise=0.1),
)


class InstantClock(ManualClock):
    """Sleeping moves it."""

    async def sleep(self, delay_s: float) -> None:
        self.advance(delay_s)


class World:
    """One incarnation."""

    def __init__(self, run_dir: Path, incarnation: int = 1) -> None:
        self.clock = InstantClock(0.0)
        checkpoints = EmulatedCheckpoints(run_dir / "checkpoints", 2)
        progress = Progress()
        world = EmulatedWorld(CONFIG, incarnation, 100, checkpoints, progress, self.clock)
        self.service = TrainingService(CONFIG, checkpoints, progress, world.execute)

    async def start(self, lineage: int, restore_step: int | None) -> StartTrainingReply:
        reply = await self.service.handle(StartTraining(lineage, restore_step))
        assert isinstance(reply, StartTrainingReply)
        return reply

    async def train(self, step: int, *, checkpoint: bool = True) -> TrainStepReply:
        await self.service.handle(AddSamples(step, (sample(2 * step), sample(2 * step + 1))))
        reply = await self.service.handle(TrainStep(step, 2, checkpoint))
        assert isinstance(reply, TrainStepReply)
        return reply


def sample(trajectory: int, **changes: Any) -> Sample:
    ids = np.array([5, 6, 7, 1], "<i4").tobytes()
    mask = bytes([0, 0, 1, 1])
    logprobs = np.array([0, 0, -1, -1], "<f4").tobytes()
    fields: dict[str, Any] = {
        "reward": 1.0,
        "masked": False,
        "num_tokens": 4,
        "ids": ids,
        "mask": mask,
    } | changes
    return Sample(trajectory, trajectory // 2, logprobs=logprobs, current=mask, **fields)


async def test_a_step_takes_its_time_and_publishes_the_next_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    started = await world.start(0, None)
    assert (started.snapshot.version, started.restored) == (Version(0, 0), False)
    assert world.clock.now() == pytest.approx(0.5)
    reply = await world.train(0)
    assert 1.4 < world.clock.now() - 0.5 < 2.8
    assert reply.snapshot.version == Version(0, 1)
    assert reply.snapshot.checksum == checksum_of(image_of(Version(0, 1)))
    assert reply.checkpoint_step == 1
    assert (reply.metrics["samples_trained"], reply.metrics["tokens_trained"]) == (2.0, 4.0)
    assert world.service.heartbeat().progress == 1


async def test_the_noise_of_a_step_is_the_same_in_every_life(tmp_path: Path) -> None:
    seconds = []
    for name in ("a", "b"):
        world = World(tmp_path / name)
        await world.start(0, None)
        for step in range(3):
            began = world.clock.now()
            await world.train(step)
            seconds.append(world.clock.now() - began)
    assert seconds[:3] == pytest.approx(seconds[3:])
    assert len({round(value, 6) for value in seconds}) == 3


async def test_a_new_world_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start(0, None)
    for step in range(3):
        await world.train(step)
    reply = await World(tmp_path, 2).start(1, -1)
    assert (reply.snapshot.version, reply.restored) == (Version(1, 3), True)
    assert reply.snapshot.sources[0].incarnation == 2
    assert EmulatedCheckpoints(tmp_path / "checkpoints", 2).steps() == [2, 3]


async def test_a_restore_makes_later_steps_things_that_never_happened(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start(0, None)
    for step in range(3):
        await world.train(step)
    reply = await World(tmp_path, 2).start(1, 2)
    assert reply.snapshot.version == Version(1, 2)
    assert EmulatedCheckpoints(tmp_path / "checkpoints", 2).steps() == [2]


async def test_a_checkpoint_that_is_not_there_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no complete checkpoint"):
        await World(tmp_path).start(1, -1)
    await World(tmp_path).start(0, None)
    with pytest.raises(ValueError, match="step-000007"):
        await World(tmp_path).start(1, 7)
    (tmp_path / "checkpoints" / "step-000000.json").write_bytes(b"{")
    with pytest.raises(ValueError, match="step-000000"):
        await World(tmp_path).start(1, 0)


async def test_a_disk_that_takes_nothing_costs_the_checkpoint_not_the_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start(0, None)
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("in the way")
    reply = await world.train(0)
    assert (reply.checkpoint_step, reply.metrics["checkpoints_failed"]) == (None, 1.0)


async def test_the_state_leaves_and_comes_back_in_the_seconds_that_were_set(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start(0, None)
    began = world.clock.now()
    offloaded = await world.service.handle(Offload())
    assert isinstance(offloaded, OffloadReply)
    assert offloaded.released_bytes == NOMINAL_STATE_BYTES
    assert world.clock.now() - began == pytest.approx(CONFIG.emulated.offload_seconds)
    began = world.clock.now()
    assert isinstance(await world.service.handle(Restore()), RestoreReply)
    assert world.clock.now() - began == pytest.approx(CONFIG.emulated.restore_seconds)
    assert (await world.train(0)).snapshot.version == Version(0, 1)


async def test_samples_that_hold_nonsense_are_counted(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start(0, None)
    bad = sample(1, ids=np.array([5, 6, 700, 1], "<i4").tobytes())
    await world.service.handle(AddSamples(0, (sample(0), bad)))
    reply = await world.service.handle(TrainStep(0, 2, False))
    assert isinstance(reply, TrainStepReply)
    assert (reply.metrics["samples_trained"], reply.metrics["samples_invalid"]) == (1.0, 1.0)
