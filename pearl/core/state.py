"""All that the core remembers, as one serialisable value: a journal segment opens with it."""

from typing import Literal

import msgspec

from pearl.core.elastic.scheduler import ElasticState
from pearl.core.pipeline.agreement import GapSums
from pearl.core.pipeline.buffer import CohortBuffer
from pearl.core.pipeline.rollout import RolloutState
from pearl.core.pipeline.training import Published
from pearl.types.config import Config
from pearl.types.counters import Counters
from pearl.types.gpu_table import AWAITED_HOST, GpuTable, GpuZone
from pearl.types.ids import GpuId
from pearl.types.lineage import Lineages
from pearl.types.trainer_state import TrainerState
from pearl.types.worker_table import WorkerTable

RunPhase = Literal["new", "running", "stopped", "finished"]
"""stopped: by a signal or a failure, and can be resumed; finished: as wished."""


class CoreState(msgspec.Struct):
    table: WorkerTable
    rollout: RolloutState
    lineages: Lineages
    trainer: TrainerState
    counters: Counters
    elastic: ElasticState
    published: Published | None = None
    phase: RunPhase = "new"
    next_op: int = 1
    num_evaluation_tasks: int = 0
    evaluation_rounds: int = 0
    first_now: float = 0.0
    gaps: GapSums = msgspec.field(default_factory=GapSums)


def fresh_state(config: Config) -> CoreState:
    table, gpu_table = fresh_table(config)
    return CoreState(
        table=table,
        rollout=RolloutState(buffer=CohortBuffer.build(config, 0)),
        lineages=Lineages(),
        trainer=TrainerState(),
        counters=Counters(),
        elastic=ElasticState(gpu_table),
    )


def fresh_table(config: Config) -> tuple[WorkerTable, GpuTable]:
    """The coordinator's own host: training GPUs first, then the dedicated workers', then those that may arrive. The
    last dedicated workers are those of reserved hosts, whose GPUs are not known yet."""
    table, gpu_table = WorkerTable(), GpuTable()
    size, num_ranks = config.rollout.gpus_per_worker, config.training.num_ranks
    reserved = config.rollout.reserved_gpus
    dedicated = num_ranks + config.rollout.num_workers * size - reserved
    gpus = [GpuId(f"local/{index}") for index in range(dedicated + config.elastic.preemptible_gpus)]
    for index, gpu in enumerate(gpus):
        zone: GpuZone = (
            "training" if index < num_ranks else "dedicated" if index < dedicated else "preemptible"
        )
        gpu_table.add(gpu, zone, present=index < dedicated)
    for first in range(num_ranks, dedicated, size):
        table.add(tuple(gpus[first : first + size]))
    awaited = [GpuId(f"{AWAITED_HOST}/{index}") for index in range(reserved)]
    for gpu in awaited:
        gpu_table.add(gpu, "dedicated", present=False)
    for first in range(0, reserved, size):
        table.add(tuple(awaited[first : first + size]))
    if config.elastic.borrow != "never":
        for first in range(0, num_ranks - size + 1, size):
            table.add(tuple(gpus[first : first + size]), "overlap")
    return table, gpu_table
