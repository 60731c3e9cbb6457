"""Hosts of the largest size that is let in: the core takes them without being held up."""

import pytest

from pearl.core.coordinator import Coordinator
from pearl.types import commands, events
from pearl.types.config import Config, ElasticConfig, EnvironmentConfig
from pearl.types.ids import GpuId
from pearl.types.messages.control import MAX_HOST_GPUS
from pearl.types.worker_table import WorkerRow


def test_the_largest_host_is_taken_without_comparing_every_worker_with_every_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[object] = []
    equal = WorkerRow.__eq__

    def count(row: WorkerRow, other: object) -> bool:
        compared.append(row)
        return bool(equal(row, other))

    monkeypatch.setattr(WorkerRow, "__eq__", count)
    core = Coordinator(
        Config(elastic=ElasticConfig(inter=True), environment=EnvironmentConfig(num_evaluation_tasks=0))
    )
    core.handle(events.Started(0, 0, True), 0.0)
    gpus = tuple(GpuId(f"h/{index}") for index in range(MAX_HOST_GPUS))
    done = core.handle(events.GpusArrived(gpus), 1.0)
    assert sum(isinstance(command, commands.StartWorker) for command in done) == MAX_HOST_GPUS
    assert not compared
