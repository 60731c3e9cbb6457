"""What is started: the process group of each kind of worker, its arguments, its GPUs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pearl.config import resolved_json
from pearl.runtime import mmap_counter
from pearl.service.processes.process_manager import LOCAL_HOST, ManagedProcess
from pearl.types.config import Config
from pearl.types.ids import GpuId
from pearl.types.messages.control import (
    COORDINATOR_PLACEHOLDER,
    DIRECTORY_PLACEHOLDER,
    AgentReport,
    PeerKind,
    StartGroup,
)

ROLLOUT_MODULE = "pearl.workers.rollout.worker"
TRAINING_MODULE = "pearl.workers.training.worker"
EMULATED_ROLLOUT_MODULE = "pearl.workers.rollout.emulated.worker"
EMULATED_TRAINING_MODULE = "pearl.workers.training.emulated.worker"
ENVIRONMENT_MODULE = "pearl.envs.worker"
CONFIG_NAME = "config.json"
HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


class NotEnoughGpusError(ValueError):
    """The settings ask for more GPUs than the host has."""


class ProcessSpecs:
    def __init__(self, config: Config, run_dir: Path, address: str, run_id: str) -> None:
        self._config = config
        # Absolute: whoever starts a group need not be where we are.
        self._run_dir = run_dir = run_dir.absolute()
        self._logs = run_dir / "logs"
        self._common = ("--address", address, "--run-id", run_id, "--config", str(run_dir / CONFIG_NAME))
        # Elsewhere our address may have another name, and our run directory need not be there.
        self._common_elsewhere = (
            *("--address", COORDINATOR_PLACEHOLDER, "--run-id", run_id),
            *("--config", f"{DIRECTORY_PLACEHOLDER}/{CONFIG_NAME}"),
        )
        self._gpu_indices: tuple[str, ...] | None = None  # None = workers of this host run on the CPU
        self._physical: set[str] = set()  # GPUs of other hosts
        self._vocabulary: tuple[str, ...] = ()

    def use(self, report: AgentReport) -> str:
        """Decide where workers run, from what the coordinator's own host has. Returns a note for the person, "" when
        there is nothing to say.

        Raises:
            NotEnoughGpusError: the settings insist on GPUs that are not there.
        """
        device = self._config.model.device
        real = [gpu.gpu.rpartition("/")[2] for gpu in report.gpus if not gpu.virtual]
        if device == "cpu" or (device == "auto" and (not real or is_emulated(self._config))):
            return ""
        needed = num_local_gpus(self._config)
        if len(real) < needed:
            raise NotEnoughGpusError(_shortage(self._config, needed, len(real)))
        self._gpu_indices = tuple(real)
        return ""

    def learn(self, report: AgentReport) -> None:
        """Record the devices of another host."""
        physical = {gpu.gpu for gpu in report.gpus if not gpu.virtual}
        if self._config.model.device == "cuda" and len(physical) < len(report.gpus):
            raise ValueError(
                f'model.device = "cuda", but {report.host} offers virtual GPUs: start it without --virtual-gpus, or '
                "run the job on the CPU"
            )
        self._physical -= {gpu for gpu in self._physical if gpu.rpartition("/")[0] == report.host}
        self._physical |= physical

    def set_vocabulary(self, size: int) -> None:
        self._vocabulary = ("--vocabulary-size", str(size))

    def rollout(self, slot: int, incarnation: int, role: str, gpus: Sequence[GpuId]) -> ManagedProcess:
        """Return the spec of a rollout worker, on the host of its GPUs."""
        name = f"rollout.{slot}.{incarnation}"
        host = gpus[0].rpartition("/")[0]
        is_local = host == LOCAL_HOST
        common = self._common if is_local else self._common_elsewhere
        place = ("--slot", str(slot), "--incarnation", str(incarnation), "--role", role)
        # Emulated workers are plain processes, whatever they are said to run on.
        module, num_processes = ROLLOUT_MODULE, len(gpus)
        if self._config.rollout.engine == "emulated":
            module, num_processes = EMULATED_ROLLOUT_MODULE, 0
        elif self._config.rollout.engine == "sglang":
            num_processes = 1  # SGLang starts a process a GPU itself
        visible = self._visible_to(gpus)
        spec = StartGroup(
            name,
            module,
            (*common, *place, *self._vocabulary),
            visible,
            num_processes,
            str(self._logs),
            files={} if is_local else {CONFIG_NAME: resolved_json(self._config).encode()},
            may_fork=self._may_fork(visible, num_processes),
        )
        if is_local:
            spec.environment[mmap_counter.ENVIRONMENT_KEY] = str(self._logs / name / "tokens")
        return ManagedProcess(spec, "rollout", slot, incarnation, host)

    def training(self, incarnation: int) -> ManagedProcess:
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

    def environment(self, slot: int, incarnation: int) -> ManagedProcess:
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
    ) -> ManagedProcess:
        name = f"{kind}.{slot}.{incarnation}"
        may_fork = self._may_fork(environment, num_processes)
        spec = StartGroup(
            name, module, arguments, environment, num_processes, str(self._logs), may_fork=may_fork
        )
        return ManagedProcess(spec, kind, slot, incarnation)

    def _may_fork(self, environment: Mapping[str, str], num_processes: int) -> bool:
        """Return whether the settings let a group start from its host's prepared process."""
        match self._config.runtime.prepared_processes:
            case "auto":
                return num_processes > 0 and environment.items() >= HIDE_GPUS.items()
            case "on":
                return num_processes > 0
            case "off":
                return False

    def _visible_to(self, gpus: Sequence[GpuId]) -> dict[str, str]:
        """Ids of this host count its GPUs; those of others hold the name that selects the GPU."""
        names = [gpu.rpartition("/")[2] for gpu in gpus]
        if gpus[0].rpartition("/")[0] == LOCAL_HOST:
            return self._visible([int(name) for name in names])
        if self._config.model.device == "cpu" or not self._physical.issuperset(gpus):
            return dict(HIDE_GPUS)
        return {"CUDA_VISIBLE_DEVICES": ",".join(names)}

    def _visible(self, indices: Sequence[int]) -> dict[str, str]:
        if self._gpu_indices is None:
            return dict(HIDE_GPUS)
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpu_indices[index] for index in indices)}


def wants_prepared_process(config: Config) -> bool:
    """Return whether the coordinator's own host surely starts workers from a prepared process."""
    uses_torch = config.training.engine != "emulated" or config.rollout.engine != "emulated"
    allowed = {"auto": config.model.device == "cpu", "on": True, "off": False}
    return uses_torch and allowed[config.runtime.prepared_processes]


def is_emulated(config: Config) -> bool:
    """Whether nothing of the run computes a model, so that GPUs are only names."""
    return config.training.engine == "emulated" and config.rollout.engine == "emulated"


def _shortage(config: Config, needed: int, there: int) -> str:
    training, rollout, elastic = config.training, config.rollout, config.elastic
    return (
        f"{needed} GPUs are needed: {training.num_ranks} for training, {rollout.num_workers} x "
        f"{rollout.gpus_per_worker} for rollout, {elastic.preemptible_gpus} preemptible; this host has {there}: lower "
        "rollout.num_workers, training.num_ranks or elastic.preemptible_gpus, or set model.device = cpu"
    )


def num_local_gpus(config: Config) -> int:
    """Count the GPUs of the coordinator's own host, those that only arrive later included."""
    rollout = config.rollout
    return (
        config.training.num_ranks
        + rollout.num_workers * rollout.gpus_per_worker
        - rollout.reserved_gpus
        + config.elastic.preemptible_gpus
    )
