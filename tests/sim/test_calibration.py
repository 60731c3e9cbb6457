"""A profile fitted to a run's journal gives back what the run was made with."""

from pathlib import Path

import msgspec
import pytest
from sim_runs import HARDWARE, SHORT, small_job

from pearl.config import ConfigError, resolved_toml
from pearl.core.coordinator import Coordinator
from pearl.runtime.journal import Journal
from pearl.service.replay import encode_commands, encode_event
from pearl.sim.calibration import fit_run
from pearl.sim.job import Job, build, make_job, run
from pearl.types.commands import AnyCommand
from pearl.types.events import AnyEvent

LINEAR = msgspec.structs.replace(
    HARDWARE,
    worker=msgspec.structs.replace(
        HARDWARE.worker,
        decode_seconds_per_sequence=4e-4,
        decode_seconds_per_context_token=0.0,
        prefill_seconds_per_token=5e-5,
        prefill_seconds_per_context_token=0.0,
    ),
)


def record(job: Job, run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(resolved_toml(job.config))
    journal = Journal.create(run_dir / "journal.msgpack", Coordinator(job.config).snapshot())
    simulation = build(job)

    def sink(now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        journal.append([(now, encode_event(event), encode_commands(commands))])

    simulation._sink = sink
    simulation.run(job.horizon_s)
    journal.close()
    return run_dir


def test_speed_training_and_costs_come_back(tmp_path: Path) -> None:
    job = small_job(hardware=LINEAR, overrides=("elastic.borrow=always",))
    fitted = fit_run(record(job, tmp_path / "run"))
    assert fitted.parameter_set == "fitted"
    for key in ("decode_fixed_seconds", "decode_seconds_per_sequence", "prefill_seconds_per_token"):
        assert getattr(fitted.worker, key) == pytest.approx(getattr(LINEAR.worker, key), rel=0.02), key
    assert fitted.worker.turn_overhead_seconds == pytest.approx(0.03, rel=0.01)
    assert fitted.training.fixed_seconds == pytest.approx(5.0, rel=0.01)
    assert fitted.training.gpu_seconds_per_token == pytest.approx(
        HARDWARE.training.gpu_seconds_per_token, rel=0.01
    )
    for key in (
        "preparation",
        "finalization",
        "activation",
        "release",
        "offload",
        "restore",
        "trainer_start",
    ):
        assert getattr(fitted.costs, key) == pytest.approx(getattr(LINEAR.costs, key), rel=0.01), key
    assert fitted.costs.weight_load == pytest.approx(LINEAR.costs.weight_transfer + LINEAR.costs.weight_load)


def test_a_fitted_run_is_simulated_as_it_was(tmp_path: Path) -> None:
    job = small_job(hardware=LINEAR)
    run_dir = record(job, tmp_path / "run")
    again = make_job(
        run_dir / "config.toml", "config", 0, overrides=SHORT, hardware_name=str(run_dir), horizon_s=1200.0
    )
    assert run(again).step_seconds == pytest.approx(run(job).step_seconds, rel=0.02)


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(resolved_toml(small_job().config))
    with pytest.raises(ConfigError, match="journal cannot be read"):
        fit_run(tmp_path)


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    job = msgspec.structs.replace(small_job(), horizon_s=5.0)
    with pytest.raises(ConfigError, match="speed cannot be fitted"):
        fit_run(record(job, tmp_path / "run"))
