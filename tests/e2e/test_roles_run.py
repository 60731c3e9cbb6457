"""Prefill and decode apart with real torch workers: roles change as GPUs come and go, and nothing else does."""

import signal
from pathlib import Path
from typing import Any

import pytest

from pearl.testing.elastic_run import ELASTIC, Workers, pearl, preempt
from pearl.testing.live_run import LiveRun, started

pytestmark = pytest.mark.timeout(300)
PRESENT = ("serving", "updating")
SURVIVOR, JOINERS = 0, (1, 2)  # slots


def newest_lives(run: LiveRun) -> dict[int, dict[str, Any]]:
    return {line["slot"]: line for line in run.metrics("worker")}


def serving_roles(run: LiveRun) -> str:
    """Of the workers that serve, for example "DDPP"."""
    lives = newest_lives(run).values()
    return "".join(sorted(line["role"][0].upper() for line in lives if line["event"] in PRESENT))


def wait_for_workers(run: LiveRun, number: int, roles: str) -> None:
    """``roles`` may leave open which they are: ""."""

    def holds() -> bool:
        found = serving_roles(run)
        return len(found) == number and roles in ("", found) and not unplaced(run)

    run.wait_for(f"{number} worker(s) {roles} to serve", holds)


def unplaced(run: LiveRun) -> list[str]:
    """What the newest plans want and no worker has yet, as slot:role."""
    wanted: dict[int, str] = {}
    for plan in run.metrics("plan"):
        wanted |= {int(slot): role for slot, role in map(pair_of, names_in(plan))}
    lives = newest_lives(run)
    return [
        f"{slot}:{role}"
        for slot, role in wanted.items()
        if lives[slot]["event"] != "gone" and lives[slot]["role"] != role
    ]


def names_in(plan: dict[str, Any]) -> list[str]:
    return [*plan["add"].split(), *plan["rebind"].split()]


def pair_of(name: str) -> tuple[str, str]:
    slot, _, role = name.partition(":")
    return slot, role


def unnamed_changes(run: LiveRun) -> list[str]:
    """Changes of role that no plan before them named."""
    plans = run.metrics("plan")
    roles: dict[tuple[int, int], str] = {}
    wrong = []
    for line in run.metrics("worker"):
        before = roles.setdefault((line["slot"], line["incarnation"]), line["role"])
        if line["role"] != before:
            roles[line["slot"], line["incarnation"]] = line["role"]
            name = f"{line['slot']}:{line['role']}"
            if not any(name in names_in(plan) for plan in plans if plan["time_s"] <= line["time_s"]):
                wrong.append(name)
    return wrong


def survivor(run: LiveRun) -> int:
    """Its pid, in its first life."""
    (process,) = run.ranks(f"rollout.{SURVIVOR}.1")
    return int(process.pid)


@pytest.mark.parametrize("pd", ["1P2D", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_roles_follow_the_workers_that_come_and_go(tmp_path: Path, pd: str) -> None:
    """1 -> 3 -> 1 workers. No token is lost, no process restarted, no role changed that a plan did not name."""
    settings = {
        **ELASTIC,
        "rollout__num_workers": 1,
        "elastic__borrow": "never",
        "elastic__preemptible_gpus": len(JOINERS),
        "elastic__pd": pd,
    }
    is_fixed = pd != "adaptive"
    with started(tmp_path / "run", **settings) as run:
        workers = Workers(run)
        run.wait_for_step(0)
        pid = survivor(run)

        preempt(run, "arrive", "--gpus", str(len(JOINERS)))
        wait_for_workers(run, 3, "DDP" if is_fixed else "")
        run.wait_for_step(len(run.steps()) + 1)

        preempt(run, "reclaim", "--gpus", str(len(JOINERS)), "--grace", "5")
        for slot in JOINERS:
            workers.wait_for(slot, 1, "gone")
        wait_for_workers(run, 1, "C")
        run.wait_for_step(len(run.steps()) + 1)
        assert survivor(run) == pid
        run.kill(signal.SIGINT)
        run.assert_stops(130)
    summary = run.assert_clean()
    assert summary["tokens_lost"] == summary["tokens_lost_planned"] == summary["workers_lost"] == 0
    assert unnamed_changes(run) == []
    if is_fixed:
        assert (summary["mode_switches"], summary["role_changes"]) == (2, 2)
    else:
        assert any(line["predicted_s"] is not None for line in run.metrics("decision"))
    result = pearl("replay", str(run.run_dir))
    assert result.returncode == 0, result.stdout + result.stderr
