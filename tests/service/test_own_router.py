"""A person's own router: found by name, checked, and handed to the core of a run, of its replay and of a simulation."""

from pathlib import Path
from typing import Any

import pytest
from whole_run import run_whole

from pearl.config import ConfigError, load, validate
from pearl.core.coordinator import Coordinator
from pearl.core.pipeline.router import Candidate
from pearl.service import coordinator_process, recovery, replay
from pearl.service.own_router import RouterError, load_router
from pearl.service.run_files import RunFiles
from pearl.sim.job import make_job
from pearl.sim.job import run as run_job
from pearl.testing.fakes import small_config
from pearl.types.config import Config, RolloutConfig
from pearl.types.ids import Slot

ROOT = Path(__file__).parents[2]
CANDIDATES = [Candidate(Slot(0), 5, 0), Candidate(Slot(2), 1, 0)]


CALLS: set[str] = set()


def last_slot(context_tokens: int, previous: Slot | None, candidates: Any) -> Slot | None:
    CALLS.add("last_slot")
    return max(c.slot for c in candidates) if candidates else None


def first_slot(context_tokens: int, previous: Slot | None, candidates: Any) -> Slot | None:
    return min(c.slot for c in candidates) if candidates else None


def foreign_slot(context_tokens: int, previous: Slot | None, candidates: Any) -> Slot:
    return Slot(99)


def raises(context_tokens: int, previous: Slot | None, candidates: Any) -> Slot:
    raise KeyError("previous")


def takes_two(context_tokens: int, candidates: Any) -> Slot:
    return Slot(0)


def config_with(router: str) -> Config:
    return Config(rollout=RolloutConfig(router=router))


def test_a_built_in_router_is_the_core_s_own() -> None:
    assert load_router(Config()) is None


def test_a_function_of_ones_own_chooses() -> None:
    config = config_with(f"{__name__}:last_slot")
    validate(config)
    choose = load_router(config)
    assert choose is not None
    assert choose(10, None, CANDIDATES) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("foreign_slot", r"chose 99, which is not a slot.*\[0, 2\]"),
        ("raises", "raised KeyError: 'previous' .*:"),
    ],
)
def test_what_it_does_wrong_is_said_with_its_name(name: str, said: str) -> None:
    choose = load_router(config_with(f"{__name__}:{name}"))
    assert choose is not None
    with pytest.raises(RouterError, match=said):
        choose(10, None, CANDIDATES)


@pytest.mark.parametrize(
    ("name", "said"),
    [("takes_two", "a router takes"), ("no_such", "has no no_such"), ("ROOT", "has no ROOT")],
)
def test_what_is_no_router_is_refused_before_anything_starts(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f'rollout.router = "{__name__}:{name}".*{said}|{said}'):
        load_router(config_with(f"{__name__}:{name}"))


def test_a_name_that_is_neither_built_in_nor_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match='"stiky" is not one of "sticky"'):
        validate(config_with("stiky"))


def test_the_core_takes_the_router_that_it_is_handed() -> None:
    config = config_with(f"{__name__}:last_slot")
    core = Coordinator(config, router=load_router(config))
    again = Coordinator.restore(config, core.snapshot(), load_router(config))
    assert again.snapshot() == core.snapshot()
    with pytest.raises(KeyError):
        Coordinator(config)


def test_the_example_keeps_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    config = load(ROOT / "launch" / "configs" / "emulated.toml", ["rollout.router=own_router:long_stays"])
    choose = load_router(config)
    assert choose is not None
    assert choose(100, Slot(0), CANDIDATES) == 2, "a short context goes where less is running"
    assert choose(4096, Slot(0), CANDIDATES) == 0, "a long one stays"
    assert choose(4096, Slot(1), CANDIDATES) is None, "and waits for its worker"


async def test_a_run_is_resumed_with_its_own_router(tmp_path: Path) -> None:
    config = small_config(router=f"{__name__}:last_slot")
    await run_whole(tmp_path / "run", config)  # replays its journal too
    CALLS.clear()
    with pytest.raises(recovery.FinishedError):  # which the core knows only when it chose as the run did
        recovery.recover(config, RunFiles(tmp_path / "run"))
    assert "last_slot" in CALLS


async def test_a_replay_notices_that_the_router_is_another(tmp_path: Path) -> None:
    await run_whole(tmp_path / "run", small_config(router=f"{__name__}:last_slot"))
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace(":last_slot", ":first_slot"))
    assert "entry " in (replay.check(tmp_path / "run") or "")


def test_its_failure_ends_a_run_with_its_own_words(tmp_path: Path) -> None:
    error = RouterError('rollout.router = "a:b" raised KeyError')
    assert coordinator_process._explained(ExceptionGroup("", [error]), tmp_path) is error


def test_a_simulated_job_is_routed_by_it() -> None:
    CALLS.clear()
    job = make_job(
        ROOT / "launch" / "configs" / "simulate-8b.toml",
        "config",
        0,
        overrides=(f"rollout.router={__name__}:last_slot",),
        horizon_s=120.0,
    )
    run_job(job)
    assert "last_slot" in CALLS
