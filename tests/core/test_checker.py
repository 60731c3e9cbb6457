"""The independent checker agrees with the core about every run of a small world, and finds planted lies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checker import check

from pearl.testing.world import World
from pearl.types.config import Config, DataConfig, EnvironmentConfig, RolloutConfig, RunConfig, TrainingConfig
from pearl.types.ids import Slot


def make_world(seed: int, num_train_tasks: int = 0) -> World:
    config = Config(
        run=RunConfig(num_steps=8),
        data=DataConfig(batch_size=8, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=3),
        rollout=RolloutConfig(max_requests_per_worker=4),
        training=TrainingConfig(checkpoint_every=3),  # so that a dead trainer takes updates with it
    )
    return World(config, seed=seed, num_train_tasks=num_train_tasks)


def write(world: World, run_dir: Path) -> Path:
    assert world.finish is not None
    lines = [msgspec.json.encode(record) for record in world.records]
    (run_dir / "trajectories.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (run_dir / "metrics.jsonl").write_text('{"kind": "note"}\n')
    (run_dir / "summary.json").write_bytes(msgspec.json.encode(world.finish.summary))
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    world = make_world(0)
    world.run()
    return write(world, tmp_path)


def test_quiet_run_is_clean(run_dir: Path) -> None:
    assert check(run_dir) == []


@pytest.mark.parametrize("seed", range(6))
def test_runs_with_failures_are_clean(seed: int, tmp_path: Path) -> None:
    world = make_world(seed)
    world.env_failure_rate = world.attempt_error_rate = 0.02
    world.start()
    for index in range(100_000):
        if world.finish is not None:
            break
        world.step()
        if world.trained and world.trained[-1][0] in (2, 5) and world.lineage < 3:
            world.lose_trainer()  # one or two steps after its last checkpoint, up to three times
        if index % 200 == 100:
            world.lose_worker(Slot(0))
    assert check(write(world, tmp_path)) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert min(summary["updates_discarded"], summary["workers_lost"], summary["tokens_discarded"]) > 0


def test_short_last_step_at_the_end_of_the_data(tmp_path: Path) -> None:
    world = make_world(0, num_train_tasks=5)
    world.run()
    assert check(write(world, tmp_path)) == []


def edit_summary(**changes: Any) -> Callable[[Path], None]:
    def edit(run_dir: Path) -> None:
        path = run_dir / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def edit_lines(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    def edit(run_dir: Path) -> None:
        path = run_dir / "trajectories.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit


def first_trained(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["trained_step"] == 1)


LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "steps": (edit_summary(steps=5), "summary says 0 .. 4"),
    "tokens_generated": (edit_summary(tokens_generated=1), "tokens_generated: summary says 1"),
    "tokens_trained": (edit_summary(tokens_trained=1), "tokens_trained: summary says 1"),
    "prefilled": (edit_summary(prefilled_tokens=1), "prefilled_tokens: summary says 1"),
    "reprefilled": (edit_summary(reprefilled_tokens=-1), "reprefilled_tokens: summary says -1"),
    "reward": (edit_summary(reward_last=7.0), "reward_last: summary says 7.0"),
    "evaluation": (edit_summary(eval_reward=7.0), "eval_reward: summary says 7.0"),
    "staleness": (edit_summary(max_staleness=9), "max_staleness: summary says 9"),
    "bound": (edit_summary(staleness_bound=-1), "bound -1"),
    "not a number": (edit_summary(seconds=float("nan")), "NaN is not JSON"),
    "trained twice": (edit_lines(lambda lines: lines.append(first_trained(lines))), "once each"),
    "lost": (edit_lines(lambda lines: lines.remove(first_trained(lines))), "once each"),
    "lost prompt": (
        edit_lines(lambda lines: lines.remove(first_trained(lines))),
        "prompts_lost: summary says 0, the trajectories 1",
    ),
    "group": (
        edit_lines(lambda lines: first_trained(lines).update(group=99)),
        "wrong prompt, group or cohort",
    ),
    "versions": (
        edit_lines(lambda lines: first_trained(lines)["turns"][0].update(generated_tokens=99)),
        "do not add up to its 99 tokens",
    ),
    "future": (
        edit_lines(lambda lines: first_trained(lines).update(trained_step=0)),
        "step 0: trains",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_planted_lies_are_found(name: str, run_dir: Path) -> None:
    plant, said = LIES[name]
    plant(run_dir)
    assert any(said in problem for problem in check(run_dir)), check(run_dir)


def test_torn_and_missing_files_are_named(run_dir: Path) -> None:
    with (run_dir / "trajectories.jsonl").open("a") as file:
        file.write('{"prompt": 1')
    (run_dir / "summary.json").unlink()
    problems = "\n".join(check(run_dir))
    assert "trajectories.jsonl: the last line is torn" in problems
    assert "summary.json: " in problems
