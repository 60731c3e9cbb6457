"""A person's own router: found by name, checked, and handed to the core of a run, of its replay and of a simulation."""

from pathlib import Path
from typing import Any

import pytest

from pearl.config import ConfigError, load, validate
from pearl.core.coordinator import Coordinator
from pearl.core.pipeline.router import Candidate
from pearl.service.own_router import RouterError, load_router
from pearl.types.config import Config, RolloutConfig
from pearl.types.ids import Slot

ROOT = Path(__file__).parents[2]
CANDIDATES = [Candidate(Slot(0), 5, 0), Candidate(Slot(2), 1, 0)]


def last_slot(context_tokens: int, home: Slot | None, candidates: Any) -> Slot | None:
    return max(c.slot for c in candidates) if candidates else None


def foreign_slot(context_tokens: int, home: Slot | None, candidates: Any) -> Slot:
    return Slot(99)


def raises(context_tokens: int, home: Slot | None, candidates: Any) -> Slot:
    raise KeyError("home")


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
    [("foreign_slot", r"chose 99, which is not a slot.*\[0, 2\]"), ("raises", "raised KeyError: 'home' .*:")],
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


def test_the_example_routes_a_simulated_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    config = load(ROOT / "launch" / "configs" / "emulated.toml", ["rollout.router=own_router:long_stays"])
    choose = load_router(config)
    assert choose is not None
    assert choose(100, Slot(0), CANDIDATES) == 2, "a short context goes where less is running"
    assert choose(4096, Slot(0), CANDIDATES) == 0, "a long one stays"
    assert choose(4096, Slot(1), CANDIDATES) is None, "and waits for its worker"


async def test_a_run_with_an_own_router_replays_and_resumes(tmp_path: Path) -> None:
    config = small_config(router=f"{__name__}:last_slot")
    life = await run_whole(tmp_path / "run", config)  # replays its journal too
    files = RunFiles(tmp_path / "run")
    with pytest.raises(FinishedError):
        recover(config, files)
    assert life.beginning.core.finished


async def test_a_replay_notices_that_the_router_is_another(tmp_path: Path) -> None:
    await run_whole(tmp_path / "run", small_config(router=f"{__name__}:last_slot"))
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace(":last_slot", ":first_slot"))
    assert "entry " in (replay.check(tmp_path / "run") or "")


def test_a_simulated_job_is_routed_by_it() -> None:
    CALLS.clear()
    job = make_job(
        ROOT / "launch" / "configs" / "simulate-8b.toml",
        "config",
        0,
        overrides=(f"rollout.router={__name__}:counted",),
        horizon_s=20.0,
    )
    assert run_job(job).steps >= 0
    assert CALLS
