"""One simulated run as a value: what it is made of, and what came out of it."""

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pearl import config as settings
from pearl.config import ConfigError
from pearl.sim import hardware, policies, workload_files
from pearl.sim.calibration import fit_run
from pearl.sim.hardware import Hardware
from pearl.sim.simulation import Simulation
from pearl.traces import counts, read_trace
from pearl.types import commands
from pearl.types.config import Config
from pearl.types.trace import TraceEvent

GC_THRESHOLD = (200_000, 20, 20)


class Job(msgspec.Struct, frozen=True):
    """One simulated run to be made. Config, hardware and trace are resolved; only ``workload`` is still a name or
    path, which ``build`` loads."""

    policy: str
    config: Config
    hardware: Hardware
    workload: str
    seed: int
    horizon_s: float
    trace: tuple[TraceEvent, ...] = ()


class StepLine(msgspec.Struct, frozen=True):
    end_s: float
    seconds: float
    train_seconds: float
    throughput_tokens_per_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one seed. Throughput is over whole steps (paper §6.1)."""

    seed: int
    throughput_tokens_per_s: float
    steps: int
    step_seconds: float  # mean
    rollout_busy_ratio: float  # of the time that workers held device memory
    training_busy_ratio: float
    gpu_hours: float
    mode_switches: int
    ratio_switches: int
    borrows: int
    arrivals: int
    reclaims: int
    expansions: int
    tokens_lost: int
    tokens_discarded: int
    prefilled_per_generated_token: float
    interrupted_attempts: int
    retractions: int
    activation_seconds: float
    deactivation_seconds: float
    prompts_trained_twice: int
    prompts_lost: int
    max_staleness: int
    per_step: list[StepLine]
    note: str = ""  # why it ended before its time


def make_job(
    config_path: Path,
    policy: str,
    seed: int,
    *,
    overrides: tuple[str, ...] = (),
    hardware_name: str | None = None,
    workload: str = "swebench",
    trace: tuple[TraceEvent, ...] | None = None,
    horizon_s: float = 7200.0,
) -> Job:
    """Build a job: the policy's settings override the file's, the person's override both; ``trace`` None means the
    config's own.

    Raises:
        ConfigError: for settings that are wrong or do not fit each other.
        TraceError: for the config's trace.
    """
    chosen = policies.find(policy)
    config = settings.load(config_path, [*chosen.overrides, *overrides])
    profile = _profile(hardware_name, config)
    if config.rollout.gpus_per_worker != profile.worker.gpus:
        raise ConfigError(
            f"rollout.gpus_per_worker: {config.rollout.gpus_per_worker}, but a worker of {profile.name} has "
            f"{profile.worker.gpus} GPUs; use that, or another --hardware"
        )
    if trace is None:
        trace = tuple(read_trace(Path(config.elastic.trace))) if config.elastic.trace else ()
    if chosen.pool_of_trace and not any(o.startswith("rollout.num_workers") for o in overrides):
        config = _with_pool(config, trace, horizon_s)
    config = _with_hardware(config, profile, trace)
    return Job(policy, config, profile, workload, seed, horizon_s, trace)


def _profile(name: str | None, config: Config) -> Hardware:
    """Load the hardware by name, from a file, fitted to a run, or by default the data sheet of the config's model."""
    if name is None:
        return hardware.for_model(config.model.path)
    path = Path(name)
    return fit_run(path) if (path / "config.toml").is_file() else hardware.load(name)


def _with_pool(config: Config, trace: tuple[TraceEvent, ...], horizon_s: float) -> Config:
    size = config.rollout.gpus_per_worker
    gpus = config.rollout.num_workers * size + mean_gpus(trace, horizon_s)
    rollout = msgspec.structs.replace(config.rollout, num_workers=math.ceil(gpus / size - 1e-9))
    return msgspec.structs.replace(config, rollout=rollout)


def mean_gpus(trace: tuple[TraceEvent, ...], horizon_s: float) -> float:
    """Return the time average of preemptible GPUs in the trace."""
    if not trace:
        return 0.0
    levels = [(min(at, horizon_s), gpus) for at, gpus in counts(trace)]
    ends = [at for at, _ in levels[1:]] + [horizon_s]
    seconds = sum((end - at) * gpus for (at, gpus), end in zip(levels, ends, strict=True))
    return seconds / horizon_s


def _with_hardware(config: Config, profile: Hardware, trace: tuple[TraceEvent, ...]) -> Config:
    """Set what the core must know of the machines."""
    replace = msgspec.structs.replace
    rollout = replace(
        config.rollout,
        kv_capacity_tokens=profile.worker.kv_capacity_tokens,
        prefill_chunk_tokens=profile.worker.prefill_chunk_tokens,
    )
    counted = tuple(event for event in trace if not event.gpus)
    most = max((gpus for _, gpus in counts(counted)), default=0) if config.elastic.inter else 0
    emulated = replace(
        config.emulated,
        kv_bytes_per_token=profile.worker.kv_bytes_per_token,
        kv_bandwidth_bytes_per_s=profile.worker.kv_bandwidth_bytes_per_s,
    )
    elastic = replace(config.elastic, trace="", preemptible_gpus=max(most, config.elastic.preemptible_gpus))
    return replace(config, rollout=rollout, emulated=emulated, elastic=elastic)


def build(job: Job) -> Simulation:
    """Load the workload and construct the simulation."""
    workload = workload_files.load(job.workload, job.seed)
    return Simulation(job.config, workload, job.hardware, job.seed, trace=job.trace)


def run(job: Job) -> Result:
    """Simulate up to ``horizon_s`` and sum up."""
    simulation = build(job)
    with relaxed_gc():
        finish = simulation.run(job.horizon_s)
    return result_of(job, simulation, finish)


def result_of(job: Job, simulation: Simulation, finish: commands.Finish) -> Result:
    """Sum up a simulation that is over."""
    seconds = simulation.clock.now
    stopped = seconds >= job.horizon_s
    note = "" if stopped else finish.error
    if left_out := simulation.preemption.left_out:
        told = f"{len(left_out)} event(s) of the trace were left out in part or whole, first: {left_out[0]}"
        note = f"{note}; {told}" if note else told
    return _result(job, simulation, finish.summary, seconds, note)


def _result(
    job: Job, simulation: Simulation, summary: Mapping[str, object], seconds: float, note: str
) -> Result:
    tally, config = simulation.metrics, job.config
    busy, held = simulation.pool.busy_and_held_seconds()
    reserved = config.training.num_ranks + config.rollout.num_workers * config.rollout.gpus_per_worker
    gpu_seconds = reserved * seconds + simulation.preemption.gpu_seconds

    def count(key: str) -> int:
        value = summary.get(key, 0)
        assert isinstance(value, int), (key, value)
        return value

    def number(key: str) -> float:
        value = summary.get(key, 0.0)
        assert isinstance(value, int | float), (key, value)
        return float(value)

    return Result(
        seed=job.seed,
        throughput_tokens_per_s=tally.throughput,
        steps=len(tally.steps),
        step_seconds=sum(s.seconds for s in tally.steps) / max(1, len(tally.steps)),
        rollout_busy_ratio=busy / held if held else 0.0,
        training_busy_ratio=simulation.training.busy_seconds / seconds if seconds else 0.0,
        gpu_hours=gpu_seconds / 3600,
        mode_switches=count("mode_switches"),
        ratio_switches=count("ratio_switches"),
        borrows=count("borrows"),
        arrivals=count("arrivals"),
        reclaims=count("reclaims"),
        expansions=count("expansions"),
        tokens_lost=count("tokens_lost") + count("tokens_lost_planned"),
        tokens_discarded=count("tokens_discarded"),
        prefilled_per_generated_token=count("prefilled_tokens") / max(1, count("tokens_generated")),
        interrupted_attempts=count("interrupted_trajectories"),
        retractions=simulation.pool.retractions,
        activation_seconds=number("activation_seconds_mean"),
        deactivation_seconds=number("deactivation_seconds_mean"),
        prompts_trained_twice=count("prompts_trained_twice"),
        prompts_lost=count("prompts_lost"),
        max_staleness=count("max_staleness"),
        per_step=[StepLine(s.end_s, s.seconds, s.train_seconds, s.throughput) for s in tally.steps],
        note=note,
    )


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Look for cycles rarely: nearly all that a simulation makes is freed by its count."""
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
