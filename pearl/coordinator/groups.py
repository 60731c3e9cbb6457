"""What is started: the process group of each kind of worker, its arguments, its GPUs."""

from collections.abc import Sequence
from pathlib import Path

from pearl.coordinator.processes import Life
from pearl.runtime import counter
from pearl.state.config import Config
from pearl.state.ids import GpuId
from pearl.state.messages.control import AgentReport, PeerKind, StartGroup

ROLLOUT_MODULE = "pearl.workers.rollout.worker"
TRAINING_MODULE = "pearl.workers.training.worker"
EMULATED_ROLLOUT_MODULE = "pearl.workers.rollout.emulated.worker"
EMULATED_TRAINING_MODULE = "pearl.workers.training.emulated.worker"
ENVIRONMENT_MODULE = "pearl.envs.worker"
HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


class NotEnoughGpusError(ValueError):
    """The settings ask for more GPUs than the host has."""


class Groups:
    def __init__(self, config: Config, run_dir: Path, address: str, run_id: str) -> None:
        self._config = config
        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._common = ("--address", address, "--run-id", run_id, "--config", str(run_dir / "config.json"))
        self._gpu_indices: tuple[str, ...] | None = None  # None = workers run on the CPU
        self._vocabulary: tuple[str, ...] = ()

    def use(self, report: AgentReport) -> str:
        """Decide where workers run, from what the host has. Returns a note for the person ("" = nothing to say).

        Raises:
            NotEnoughGpusError: the settings insist on GPUs that are not there.
        """
        device = self._config.model.device
        real = [gpu.gpu.rpartition("/")[2] for gpu in report.gpus if not gpu.virtual]
        needed = self._config.training.num_ranks + (
            self._config.rollout.num_workers * self._config.rollout.gpus_per_worker
        )
        if device == "cpu" or (device == "auto" and not real):
            return ""
        if len(real) >= needed:
            self._gpu_indices = tuple(real)
            return ""
        shortage = (
            f"{needed} GPUs are needed, one a training rank and a rollout rank; {report.host} has {len(real)}"
        )
        if device == "cuda":
            raise NotEnoughGpusError(
                f"{shortage}: lower rollout.num_workers or training.num_ranks, or set model.device = cpu"
            )
        return f"{shortage}: running on the CPU"

    def set_vocabulary(self, size: int) -> None:
        self._vocabulary = ("--vocabulary-size", str(size))

    def rollout(self, slot: int, incarnation: int, gpus: Sequence[GpuId]) -> Life:
        name = f"rollout.{slot}.{incarnation}"
        environment = {
            counter.ENVIRONMENT_KEY: str(self._logs / name / "tokens"),
            **self._visible([int(gpu.rpartition("/")[2]) for gpu in gpus]),
        }
        numbers = ("--slot", str(slot), "--incarnation", str(incarnation))
        arguments = (*self._common, *numbers, *self._vocabulary)
        # Emulated workers are plain processes, whatever they are said to run on.
        module, num_processes = ROLLOUT_MODULE, len(gpus)
        if self._config.rollout.engine == "emulated":
            module, num_processes = EMULATED_ROLLOUT_MODULE, 0
        return self._life("rollout", slot, incarnation, module, arguments, environment, num_processes)

    def training(self, incarnation: int) -> Life:
        num_ranks = self._config.training.num_ranks
        arguments = (
            *self._common,
            *("--incarnation", str(incarnation)),
            *("--run-dir", str(self._run_dir)),
            *self._vocabulary,
        )
        visible = self._visible(range(num_ranks))
        module = TRAINING_MODULE
        if self._config.training.engine == "emulated":
            module, num_ranks = EMULATED_TRAINING_MODULE, 0
        return self._life("training", 0, incarnation, module, arguments, visible, num_ranks)

    def environment(self, slot: int, incarnation: int) -> Life:
        arguments = (*self._common, "--slot", str(slot), "--incarnation", str(incarnation))
        return self._life("environment", slot, incarnation, ENVIRONMENT_MODULE, arguments, HIDE_GPUS, 0)

    def _life(
        self,
        kind: PeerKind,
        slot: int,
        incarnation: int,
        module: str,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        num_processes: int,
    ) -> Life:
        name = f"{kind}.{slot}.{incarnation}"
        spec = StartGroup(name, module, arguments, environment, num_processes, str(self._logs))
        return Life(spec, kind, slot, incarnation)

    def _visible(self, indices: Sequence[int]) -> dict[str, str]:
        if self._gpu_indices is None:
            return HIDE_GPUS
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpu_indices[index] for index in indices)}
