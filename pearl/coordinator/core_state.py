"""All that the core remembers, as one serialisable value: a journal segment opens with it."""

from typing import Literal

import msgspec

from pearl.pipeline.buffer import CohortBuffer
from pearl.pipeline.counters import Counters
from pearl.pipeline.rollout import RolloutState
from pearl.pipeline.training import Published, TrainerState
from pearl.state.config import Config
from pearl.state.ids import GpuId
from pearl.state.lineage import Lineages
from pearl.state.worker_table import WorkerTable

RunPhase = Literal["new", "running", "stopped", "finished"]
"""stopped: by a signal or a failure, and can be resumed; finished: as wished."""


class CoreState(msgspec.Struct):
    table: WorkerTable
    rollout: RolloutState
    lineages: Lineages
    trainer: TrainerState
    counters: Counters
    published: Published | None = None
    phase: RunPhase = "new"
    next_op: int = 1
    num_evaluation_tasks: int = 0
    evaluation_rounds: int = 0
    first_now: float = 0.0


def fresh_state(config: Config) -> CoreState:
    table = WorkerTable()
    per_worker = config.rollout.gpus_per_worker
    for worker in range(config.rollout.num_workers):
        first = config.training.num_ranks + worker * per_worker
        table.add(tuple(GpuId(f"local/{first + i}") for i in range(per_worker)))
    return CoreState(
        table=table,
        rollout=RolloutState(buffer=CohortBuffer.build(config, 0)),
        lineages=Lineages(),
        trainer=TrainerState(),
        counters=Counters(),
    )
