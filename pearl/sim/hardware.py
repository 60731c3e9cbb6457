"""Hardware profiles: what a model's workers and its training world cost on given GPUs, each figure with its source.

A profile is a TOML file with the sections [worker], [costs], [training] and [sources], the last with a line for each
group of figures. Shipped ones are in ``launch/hardware/``.
"""

import tomllib
from pathlib import Path

import msgspec

from pearl.config import ConfigError
from pearl.config.suggestions import nearest

MAX_BYTES = 1 << 20
"""Of a file; what is larger is no profile."""
SHIPPED = Path(__file__).parents[2] / "launch" / "hardware"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of the sections."""


class WorkerSpeed(Section, frozen=True):
    """The speed of one worker (all its GPUs). An engine iteration takes the sum of its fixed time, of each
    sequence it decodes, and of each token it prefills."""

    gpus: int
    decode_fixed_seconds: float  # A, an iteration: weights are read once
    decode_seconds_per_sequence: float  # b = this + context * the next
    decode_seconds_per_context_token: float
    prefill_seconds_per_token: float  # t_prefill at context c = this + c * the next
    prefill_seconds_per_context_token: float
    prefill_chunk_tokens: int  # at most so many an iteration
    kv_capacity_tokens: int
    kv_bytes_per_token: float
    kv_bandwidth_bytes_per_s: float  # out of one worker, between prefill and decode
    prefix_hit_ratio: float = 1.0  # of turns that find the kept prefix; text rendered anew does not
    turn_overhead_seconds: float = 0.0  # from an attempt's last token to the environment, in the coordinator


class Costs(Section, frozen=True):
    """Seconds that operations on whole workers take."""

    trainer_start: float
    preparation: float  # a worker's process to ready
    finalization: float  # its first weights, routing and groups, until it may serve
    weight_transfer: float  # a new version to a serving worker, which goes on meanwhile
    weight_load: float  # and its engine stopped for the loading
    activation: float  # of a borrowed worker: memory, weights, proof
    release: float  # of its memory
    offload: float  # of the training state
    restore: float
    role_switch: float = 2.0  # of a drained worker, between prefill and decode
    mode_switch: float = 20.0  # and to or from colocated
    exit: float = 2.0  # a worker asked to leave, to its processes gone
    reaction: float = 1.0  # a worker dead, until that is known


class TrainingSpeed(Section, frozen=True):
    fixed_seconds: float
    gpu_seconds_per_token: float  # of all tokens in the batch's trajectories


class EnvironmentHosts(Section, frozen=True):
    latency_scale: float = 1.0  # on the workload's environment latencies


class Failures(Section, frozen=True):
    worker_hours: float = 0.0  # mean time between losses of one rollout worker; 0 = never
    environment_rate: float = 0.0  # of steps


class Hardware(Section, frozen=True):
    name: str
    model: str
    parameter_set: str  # "data sheet", "load-bound", "fitted", ...
    worker: WorkerSpeed
    costs: Costs
    training: TrainingSpeed
    environment: EnvironmentHosts = EnvironmentHosts()
    failures: Failures = Failures()
    sources: dict[str, str] = {}


def load(name: str) -> Hardware:
    """Load a shipped profile by its name, or a file.

    Raises:
        ConfigError: there is none, or something in it is wrong.
    """
    path = Path(name)
    if path.suffix != ".toml" or not path.is_file():
        path = SHIPPED / f"{name}.toml"
    if not path.is_file():
        known = shipped_names()
        guess = nearest(name, known)
        hint = (
            f"did you mean {guess}?"
            if guess
            else f"shipped ones are {', '.join(known)}, or give a .toml file"
        )
        raise ConfigError(f'--hardware: there is no profile "{name}"; {hint}')
    return _read(path)


def for_model(model: str) -> Hardware:
    """Return the shipped data-sheet profile of a model, so that a config's ``model.path`` is enough."""
    for name in shipped_names():
        hardware = _read(SHIPPED / f"{name}.toml")
        if hardware.model == model and hardware.parameter_set == "data sheet":
            return hardware
    raise ConfigError(
        f'model.path: no shipped hardware profile is for "{model}"; give one with --hardware '
        f"({', '.join(shipped_names())})"
    )


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _read(path: Path) -> Hardware:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 10} KiB, which is no hardware profile")
        hardware = msgspec.convert(tomllib.loads(text), Hardware)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: is no hardware profile: {error}") from None
    _check(path, text, hardware)
    return hardware


def _line_of(text: str, key: str) -> str:
    """Find the line of a key for an error message; keys are unique over all sections but for comments."""
    lines = enumerate(text.splitlines(), start=1)
    found = [number for number, line in lines if line.partition("=")[0].strip() == key]
    return f", line {found[0]}" if found else ""


def _check(path: Path, text: str, hardware: Hardware) -> None:
    """Refuse negative values, and zero where the value is divided by."""
    for section in ("worker", "costs", "training", "environment", "failures"):
        for key, value in msgspec.structs.asdict(getattr(hardware, section)).items():
            if not 0 <= value < float("inf"):
                where = f"{path}{_line_of(text, key)}"
                raise ConfigError(f"{where}: {section}.{key} = {value}: must be at least 0 and finite")
    for key in (
        "gpus",
        "decode_fixed_seconds",
        "prefill_chunk_tokens",
        "kv_capacity_tokens",
        "kv_bytes_per_token",
        "kv_bandwidth_bytes_per_s",
    ):
        if getattr(hardware.worker, key) <= 0:
            raise ConfigError(f"{path}{_line_of(text, key)}: worker.{key} = 0: must be greater than 0")
