"""What the core's parts share: the settings, the tables that all of them read, and where their commands go."""

from typing import NamedTuple

from pearl.types.change_flag import ChangeFlag
from pearl.types.command_buffer import CommandBuffer
from pearl.types.config import Config
from pearl.types.counters import Counters
from pearl.types.gpu_table import GpuTable
from pearl.types.lineage import Lineages
from pearl.types.trainer_state import TrainerState
from pearl.types.worker_table import WorkerTable


class CoreContext(NamedTuple):
    """One a core. Each part takes from it what it uses, beside its own state and the parts that it drives."""

    config: Config
    table: WorkerTable
    gpu_table: GpuTable
    trainer: TrainerState
    lineages: Lineages
    counters: Counters
    commands: CommandBuffer
    changes: ChangeFlag  # of workers, GPUs, lending and the training world
