"""A hardware profile from a run's journal: what its iterations, its training steps and its reconfigurations took.

What the run never did keeps a figure of zero cost, and the profile's ``sources`` say so.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import msgspec

from pearl.config import ConfigError, load
from pearl.core.elastic.iteration_fit import NOTHING, IterationFit, add, fit
from pearl.runtime import journal
from pearl.runtime.wal import DamagedError
from pearl.service.replay import decode_commands, decode_event
from pearl.sim.hardware import Costs, Hardware, TrainingSpeed, WorkerSpeed
from pearl.types import commands, events
from pearl.types.commands import AnyCommand
from pearl.types.config import Config
from pearl.types.events import AnyEvent
from pearl.types.ids import Incarnation, OpId, Slot
from pearl.types.profile import IterationSums


class ObservedTimes:
    """Durations in seconds by what they are of, and sums over engine iterations."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.steps: list[tuple[float, float]] = []  # (tokens, seconds) of training steps
        self.serving: IterationSums = NOTHING
        self.prefilling: IterationSums = NOTHING
        self._asked: dict[OpId, tuple[float, AnyCommand]] = {}
        self._roles: dict[Slot, str] = {}
        self._proven: set[tuple[Slot, Incarnation]] = set()

    def on_command(self, command: AnyCommand, now: float) -> None:
        if isinstance(command, commands.StartWorker | commands.SetRole):
            self._roles[command.slot] = command.role
        op = getattr(command, "op", None)
        if op is not None:
            self._asked[op] = now, command

    def on_event(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, events.TokensStreamed) and event.iterations is not None:
            if self._roles.get(event.slot) == "prefill":
                self.prefilling = add(self.prefilling, event.iterations)
            else:
                self.serving = add(self.serving, event.iterations)
        asked = self._asked.pop(getattr(event, "op", OpId(0)), None)
        if asked is not None:
            self._answered(event, asked[1], now - asked[0])

    def _answered(self, event: AnyEvent, command: AnyCommand, seconds: float) -> None:
        match event:
            case events.WorkerReady():
                self._note("preparation", seconds)
            case events.WeightsVerified():
                self._on_proven(event, command, seconds)
            case events.EpisodeStepped():
                self._note("turn_overhead", max(0.0, seconds - event.seconds))
            case events.TrainerReady():
                self._note("trainer_start", seconds)
            case events.TrainFinished():
                assert isinstance(command, commands.Train), command
                self.steps.append((sum(sample.tokens for sample in command.samples), seconds))
            case events.WorkerReleased():
                self._note("release", seconds)
            case events.RoleSet():
                self._note("role_switch", seconds)
            case events.TrainingOffloaded():
                self._note("offload", seconds)
            case events.TrainingRestored():
                self._note("restore", seconds)

    def _on_proven(self, event: events.WeightsVerified, command: AnyCommand, seconds: float) -> None:
        """Record the time of an update; a worker's first weights count as part of its start."""
        if isinstance(command, commands.ActivateWorker):
            self._note("activation", seconds)
        elif (event.slot, event.incarnation) in self._proven:
            self._note("weight_load", seconds)
        else:
            self._note("finalization", seconds)
        self._proven.add((event.slot, event.incarnation))

    def _note(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)

    def mean(self, what: str) -> float:
        found = self.seconds.get(what)
        return fmean(found) if found else 0.0


def fit_run(run_dir: Path) -> Hardware:
    """Fit a hardware profile to the machines that a run was made on.

    Raises:
        ConfigError: the directory holds no usable journal, or too little has happened in it.
    """
    config = load(run_dir / "config.toml")
    observed = ObservedTimes()
    try:
        _read(run_dir / "journal.msgpack", observed)
    except (ValueError, DamagedError) as error:
        raise ConfigError(f"{run_dir}: its journal cannot be read: {error}") from None
    iterations = fit(observed.serving, observed.prefilling)
    if isinstance(iterations, str):
        raise ConfigError(f"{run_dir}: the engines' speed cannot be fitted: {iterations}")
    if not observed.steps:
        raise ConfigError(f"{run_dir}: no training step has ended, so there is nothing to fit its time to")
    return _profile(run_dir, config, observed, iterations)


def _read(path: Path, observed: ObservedTimes) -> None:
    for segment in journal.read(path):
        for entry in segment.entries:
            observed.on_event(decode_event(entry.event), entry.now)
            for command in decode_commands(entry.commands):
                observed.on_command(command, entry.now)


def _profile(run_dir: Path, config: Config, observed: ObservedTimes, iterations: IterationFit) -> Hardware:
    mean: Callable[[str], float] = observed.mean
    names = msgspec.structs.fields(Costs)
    costs = {field.name: mean(field.name) for field in names if field.name in observed.seconds}
    required = {field.name: 0.0 for field in names if field.required}
    return Hardware(
        name=run_dir.name,
        model=config.model.path,
        parameter_set="fitted",
        worker=WorkerSpeed(
            gpus=config.rollout.gpus_per_worker,
            decode_fixed_seconds=iterations.decode_fixed_seconds or 1e-6,
            decode_seconds_per_sequence=iterations.decode_seconds_per_seq or 0.0,
            decode_seconds_per_context_token=iterations.decode_seconds_per_context_token,
            prefill_seconds_per_token=iterations.prefill_seconds_per_token or 0.0,
            prefill_seconds_per_context_token=0.0,
            prefill_chunk_tokens=config.rollout.prefill_chunk_tokens,
            kv_capacity_tokens=config.rollout.kv_capacity_tokens,
            kv_bytes_per_token=config.emulated.kv_bytes_per_token,
            kv_bandwidth_bytes_per_s=config.emulated.kv_bandwidth_bytes_per_s,
            turn_overhead_seconds=mean("turn_overhead"),
        ),
        costs=Costs(**{**required, **costs}),
        training=_training(observed.steps, config.training.num_ranks),
        sources={
            "all": f"fitted to {run_dir}: {observed.serving.count + observed.prefilling.count:.0f} iterations, "
            f"{len(observed.steps)} training steps; never seen, so 0: "
            + (", ".join(name for name in required if name not in costs) or "nothing")
        },
    )


def _training(steps: list[tuple[float, float]], num_gpus: int) -> TrainingSpeed:
    """Fit a straight line over the batch's tokens; the mean when the data show no slope."""
    mean_tokens, mean_seconds = (fmean(column) for column in zip(*steps, strict=True))
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in steps)
    shared = sum((tokens - mean_tokens) * (seconds - mean_seconds) for tokens, seconds in steps)
    slope = shared / spread if spread else 0.0
    slope = min(max(0.0, slope), mean_seconds / mean_tokens)  # neither part may be negative
    return TrainingSpeed(
        fixed_seconds=mean_seconds - slope * mean_tokens, gpu_seconds_per_token=slope * num_gpus
    )
